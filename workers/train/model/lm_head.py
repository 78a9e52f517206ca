"""The end of a model: from its last hidden states to logits.

Log-probs are made without the model's own logits (`chunked.py`), so what its code does to them behind the output layer
has to be known. Configurations tell, in keys that mean different things in different models
(`logits_scaling` divides in Granite, multiplies in HyperCLOVA X). So whatever they may mean is tried when a model is
loaded, on logits of every size from 0.1 to 100, and what gives the model's own is taken. Where nothing does, the
model's logits are used as they are, which is right and takes memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import structlog
import torch
from torch import Tensor, nn

from workers.train.distributed.sharding import full_tensor
from workers.train.model.logit_blocks import LogitTransform

log = structlog.get_logger()

SCALES: Final = (
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "output_multiplier",
    "logits_mup_width_multiplier",
)
"""Keys of a configuration that may be a factor of logits, or a divisor."""
SOFTCAPS: Final = ("final_logit_softcapping", "softcap", "logit_softcap")
"""Keys of a configuration that may be a cap of logits."""
SIZES: Final = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Standard deviations of the logits that a guess is tried on: where no cap is felt, and where it is all that is."""


@dataclass(frozen=True, slots=True)
class LMHead:
    """The output layer, and what is done to logits behind it."""

    layer: nn.Linear
    transform: LogitTransform

    @property
    def weight_VH(self) -> Tensor:
        """The whole weight, with gradient for the parameter."""
        return full_tensor(self.layer.weight)

    @property
    def bias_V(self) -> Tensor | None:
        """The whole bias, if there is one."""
        return None if self.layer.bias is None else full_tensor(self.layer.bias)


def find_lm_head(model: Any) -> LMHead | None:
    """The model's head; None, and a line in the log, where logits can be had of the model alone."""
    layer = model.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        log.info("lm_head.unknown", model=type(model).__name__, reason=f"its output layer is {_layer_kind(layer)}")
        return None
    expected = _own_logits(model, layer)
    if expected is None:
        log.info(
            "lm_head.unknown", model=type(model).__name__, reason="its output layer is not run once over all tokens"
        )
        return None
    hidden_NH, logits_NV = expected
    head = LMHead(layer, LogitTransform())
    with torch.no_grad():
        products_NV = nn.functional.linear(hidden_NH, head.weight_VH, head.bias_V).to(logits_NV.dtype)
        for finish in _candidate_transforms(model.config):
            if _nearly_equal(_apply_transform(products_NV, finish), logits_NV):
                return LMHead(layer, finish)
    log.info(
        "lm_head.unknown", model=type(model).__name__, reason="it does to logits what its configuration does not tell"
    )
    return None


@contextmanager
def replace_hidden(layer: nn.Module, replacement: Any) -> Iterator[None]:
    """Let the output layer be given what `swap` makes of the hidden states that it would have got."""
    hook = layer.register_forward_pre_hook(lambda _, inputs: (replacement(inputs[0]), *inputs[1:]))
    try:
        yield
    finally:
        hook.remove()


def _layer_kind(layer: Any) -> str:
    return "no module of its own" if layer is None else f"a {type(layer).__module__}.{type(layer).__name__}"


def _own_logits(model: Any, layer: nn.Linear) -> tuple[Tensor, Tensor] | None:
    """Hidden states of every size, and the logits that the model's code makes of them."""
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
    """Everything that a configuration might mean, the simplest first."""
    text = config.get_text_config()
    scales = [1.0, *(s for value in _numbers(text, SCALES) for s in (value, 1 / value))]
    caps = [0.0, *_numbers(text, SOFTCAPS)]
    yield from (LogitTransform(scale, cap) for cap, scale in product(caps, scales))


def _numbers(config: Any, keys: tuple[str, ...]) -> list[float]:
    values = [getattr(config, key, None) for key in keys]
    return [float(value) for value in values if isinstance(value, int | float) and value > 0]


def _apply_transform(products_NV: Tensor, finish: LogitTransform) -> Tensor:
    scaled_NV = products_NV * finish.scale
    return (scaled_NV / finish.softcap).tanh() * finish.softcap if finish.softcap else scaled_NV


def _nearly_equal(found_NV: Tensor, expected_NV: Tensor) -> bool:
    """To the rounding of the type, measured by each token's largest logit."""
    if found_NV.shape != expected_NV.shape:
        return False
    bound = 1e-10 if expected_NV.dtype == torch.float64 else 1e-4
    errors_N = (found_NV - expected_NV).abs().amax(dim=1) / expected_NV.abs().amax(dim=1).clamp(min=1e-12)
    return bool((errors_N <= bound).all())
