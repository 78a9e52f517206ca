"""The LM head of a model, from its last hidden states to logits; and the critic, a value head on these states.

Log-probs are computed without the model's own logits (`logit_blocks.py`), so any transform that the model applies
after its output layer must be known. Configuration keys are ambiguous: `logits_scaling` divides in Granite and
multiplies in HyperCLOVA X. So every meaning that the configuration may have is tried when a model is loaded, on
logits from 0.1 to 100, and the one that reproduces the model's logits is used. If none does, the model's own logits
are used, which is correct and takes more memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import structlog
import torch
from torch import Tensor, nn

from workers.train.model.logit_blocks import LogitTransform
from workers.train.ranks import full_tensor

log = structlog.get_logger()

SCALES: Final = (
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "output_multiplier",
    "logits_mup_width_multiplier",
)
"""Configuration keys that may be a factor or a divisor of logits."""
SOFTCAPS: Final = ("final_logit_softcapping", "softcap", "logit_softcap")
"""Configuration keys that may be a cap of logits."""
SIZES: Final = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Standard deviations of trial logits: small ones that a cap does not affect, and large ones that it dominates."""


@dataclass(frozen=True, slots=True)
class LMHead:
    """The output layer and the transform after it."""

    layer: nn.Linear
    transform: LogitTransform

    @property
    def weight_VH(self) -> Tensor:
        """The full weight, with gradient for the parameter."""
        return full_tensor(self.layer.weight)

    @property
    def bias_V(self) -> Tensor | None:
        """The full bias, or None."""
        return None if self.layer.bias is None else full_tensor(self.layer.bias)


def find_lm_head(model: Any) -> LMHead | None:
    """Return the model's LM head; log and return None if only the model itself can compute its logits."""
    layer = model.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        log.info("lm_head.unknown", model=type(model).__name__, reason=f"its output layer is {_layer_kind(layer)}")
        return None
    expected = _own_logits(model, layer)
    if expected is None:
        log.info(
            "lm_head.unknown", model=type(model).__name__, reason="its output layer does not run once over all tokens"
        )
        return None
    hidden_NH, logits_NV = expected
    head = LMHead(layer, LogitTransform())
    with torch.no_grad():
        products_NV = nn.functional.linear(hidden_NH, head.weight_VH, head.bias_V).to(logits_NV.dtype)
        for transform in _candidate_transforms(model.config):
            if _nearly_equal(_apply_transform(products_NV, transform), logits_NV):
                return LMHead(layer, transform)
    log.info(
        "lm_head.unknown", model=type(model).__name__, reason="no meaning of its configuration reproduces its logits"
    )
    return None


@contextmanager
def replace_hidden(layer: nn.Module, replacement: Any) -> Iterator[None]:
    """Replace the hidden states that enter the output layer by `replacement` of them."""
    hook = layer.register_forward_pre_hook(lambda _, inputs: (replacement(inputs[0]), *inputs[1:]))
    try:
        yield
    finally:
        hook.remove()


def _layer_kind(layer: Any) -> str:
    return "no module of its own" if layer is None else f"a {type(layer).__module__}.{type(layer).__name__}"


def _own_logits(model: Any, layer: nn.Linear) -> tuple[Tensor, Tensor] | None:
    """Return hidden states of every trial size, and the logits that the model computes from them."""
    made: list[Tensor] = []

    def make(hidden: Tensor) -> Tensor:
        noise = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0)).to(hidden)
        norms_V = full_tensor(layer.weight).norm(dim=1)
        sizes_N1 = torch.tensor(SIZES).to(hidden).unsqueeze(1) / norms_V.square().mean().sqrt().clamp(min=1e-12)
        made.append(noise * sizes_N1)
        return made[-1]

    tokens_1N = torch.arange(len(SIZES), device=layer.weight.device).unsqueeze(0) % layer.out_features
    with torch.no_grad(), replace_hidden(layer, make):
        logits: Tensor = model(input_ids=tokens_1N, use_cache=False).logits
    if len(made) != 1 or made[0].shape[:2] != tokens_1N.shape or logits.shape[:2] != tokens_1N.shape:
        return None
    return made[0].squeeze(0), logits.squeeze(0)


def _candidate_transforms(config: Any) -> Iterator[LogitTransform]:
    """Yield every transform that a configuration might mean, simplest first."""
    text = config.get_text_config()
    scales = [1.0, *(s for value in _numbers(text, SCALES) for s in (value, 1 / value))]
    caps = [0.0, *_numbers(text, SOFTCAPS)]
    yield from (LogitTransform(scale, cap) for cap, scale in product(caps, scales))


def _numbers(config: Any, keys: tuple[str, ...]) -> list[float]:
    values = [getattr(config, key, None) for key in keys]
    return [float(value) for value in values if isinstance(value, int | float) and value > 0]


def _apply_transform(products_NV: Tensor, transform: LogitTransform) -> Tensor:
    scaled_NV = products_NV * transform.scale
    return (scaled_NV / transform.softcap).tanh() * transform.softcap if transform.softcap else scaled_NV


def _nearly_equal(found_NV: Tensor, expected_NV: Tensor) -> bool:
    """Compare up to the rounding of the dtype, relative to each token's largest logit."""
    if found_NV.shape != expected_NV.shape:
        return False
    bound = 1e-10 if expected_NV.dtype == torch.float64 else 1e-4
    errors_N = (found_NV - expected_NV).abs().amax(dim=1) / expected_NV.abs().amax(dim=1).clamp(min=1e-12)
    return bool((errors_N <= bound).all())


class Critic(nn.Module):
    """Predicts the reward to go from the hidden state before a token.

    Two layers on detached hidden states, so the value loss does not train the policy. The last layer starts at 0, so an
    untrained critic returns 0.

    Args:
        hidden_size: of the policy's hidden states.
        width: size of the inner layer.
        seed: of the inner layer's weights.
    """

    def __init__(self, hidden_size: int, width: int, seed: int) -> None:
        super().__init__()
        self.inner = nn.Linear(hidden_size, width)
        self.outer = nn.Linear(width, 1)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.inner.weight.copy_(torch.randn(width, hidden_size, generator=generator) / hidden_size**0.5)
            self.inner.bias.zero_()
            self.outer.weight.zero_()
            self.outer.bias.zero_()

    def forward(self, hidden_NH: Tensor) -> Tensor:
        """Return the values (N) of hidden states, in the dtype of the critic's weights."""
        inner_NW = self.inner(hidden_NH.to(self.inner.weight.dtype))
        values: Tensor = self.outer(torch.nn.functional.silu(inner_NW)).squeeze(-1)
        return values


def hidden_size(model: Any) -> int:
    """Return the size of the last hidden states of a Hugging Face model.

    Raises:
        ValueError: the output layer is not a separate module, so hidden states cannot be captured.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError("the model's output layer is not a separate module, so a value head cannot replace it")
    return int(head.weight.shape[1])
