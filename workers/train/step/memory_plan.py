"""How much memory a trainer needs, and how many tokens of a pass fit into what it has. Loads no torch.

::

    peak    = process + weights + optimizer + copies + pass(tokens)
    process   the interpreter with its libraries
    weights   of the policy, and of a reference policy
    optimizer gradients and AdamW's two moments of what is trained
    copies    of the weights, on their way to engines and disk while the next step trains
    pass      activations of one micro-batch: `PassMemory`

A model of known architecture has an upper bound of its passes by its configuration alone. Only where this bound does
not fit, passes are measured (`workers.train.model.pass_memory`), which loads torch.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from stream.wording import format_bytes
from workers.role.memory import PassMemory, engine_cache_bytes
from workers.settings import Settings

MAX_TOKENS: Final = 16_384
"""Most tokens that are chosen, whatever the memory; chosen, not measured."""
MIN_TOKENS: Final = 256
"""A machine on which no pass of this size fits is refused; rows may all be shorter."""
HEADROOM: Final = 0.15
"""Share of the memory that a choice leaves free, since allocators lose some of it between blocks; chosen."""
_MULTIPLE: Final = 64
TRAINER_BYTES: Final = 470 << 20
"""Memory of a trainer before it has loaded a model: 412 to 465 MB in `benchmarks/memory.py`, peft included."""
_HEAP_GAPS: Final = 0.35
"""Gaps of the heap with an adapter, as a share of the bound of `rough_passes`; `benchmarks/memory.py` measures it."""
_LOGITS_BYTES: Final = 3 * (64 << 20)
"""Blocks of logits that exist at a time (`workers.train.model.logit_blocks`)."""


class ModelShape(Struct, frozen=True, kw_only=True):
    """What decides about memory in the configuration of a decoder."""

    layers: int
    hidden: int
    intermediate: int
    key_value_size: int
    """Channels of all key heads of a layer."""
    query_size: int
    vocabulary: int
    is_bfloat16: bool
    """Its files are in bfloat16."""
    is_plain: bool
    """It has no experts, and each layer is attention and a gated network, so that bounds by these numbers hold."""

    @classmethod
    def read(cls, folder: Path) -> "ModelShape | None":
        """Read the configuration in a model's folder; None if it does not say these numbers."""
        try:
            config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
            text = config | (config.get("text_config") or {})
            heads = int(text["num_attention_heads"])
            hidden = int(text["hidden_size"])
            size = int(text.get("head_dim") or hidden // heads)
            kinds = set(text.get("layer_types") or ["full_attention"])
            return cls(
                layers=int(text["num_hidden_layers"]),
                hidden=hidden,
                intermediate=int(text["intermediate_size"]),
                key_value_size=size * int(text.get("num_key_value_heads") or heads),
                query_size=size * heads,
                vocabulary=int(text["vocab_size"]),
                is_bfloat16="bfloat16" in {text.get("dtype"), text.get("torch_dtype")},
                is_plain=kinds <= {"full_attention", "sliding_attention"} and not any("expert" in key for key in text),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
            return None

    @property
    def parameters(self) -> int:
        """About how many parameters the model has, with an output layer of its own."""
        layer = 2 * self.hidden * (self.query_size + self.key_value_size) + 3 * self.hidden * self.intermediate
        return self.layers * layer + 2 * self.vocabulary * self.hidden

    def adapter_parameters(self, rank: int) -> int:
        """Return how many parameters an adapter of this rank has at most."""
        attention = 2 * (self.hidden + self.query_size) + 2 * (self.hidden + self.key_value_size)
        return rank * self.layers * (attention + 3 * (self.hidden + self.intermediate))

    def cache_bytes(self, tokens: int, width: int) -> int:
        """Return the bytes of keys and values of this number of tokens, `width` bytes each number."""
        return 2 * self.layers * self.key_value_size * width * tokens


class TrainerMemory(Struct, frozen=True, kw_only=True):
    """Bytes that a trainer needs, at the moment of a step at which it needs most."""

    process: float
    weights: float
    optimizer: float
    copies: float
    passes: PassMemory
    longest: int
    """Tokens of the longest row."""

    @property
    def fixed(self) -> float:
        """All but the pass."""
        return self.process + self.weights + self.optimizer + self.copies

    def peak(self, tokens: int) -> float:
        """Return the bytes with passes over this number of tokens."""
        return self.fixed + self.passes.bytes_of(tokens, self.longest)

    def choose_tokens(self, budget: float) -> int:
        """Return the largest `micro_batch_tokens` that fits into these bytes with some room; 0 if none does."""
        tokens = self.passes.tokens_in(budget * (1 - HEADROOM) - self.fixed, self.longest)
        return min(MAX_TOKENS, tokens // _MULTIPLE * _MULTIPLE if tokens >= _MULTIPLE else 0)

    def describe(self) -> str:
        """Return the figures in words."""
        per_token = self.passes.bytes_of(MIN_TOKENS, MIN_TOKENS) - self.passes.bytes_of(0, MIN_TOKENS)
        return (
            f"weights {format_bytes(self.weights)}, optimizer {format_bytes(self.optimizer)}, "
            f"{format_bytes(per_token / MIN_TOKENS)} per token"
        )


def plan_memory(
    settings: Settings, *, parameters: int, trained: int, passes: PassMemory, process: float = TRAINER_BYTES
) -> TrainerMemory:
    """Return what a trainer that is alone on its CPU needs.

    Args:
        settings: of the run.
        parameters: of the policy.
        trained: how many of these parameters get gradients.
        passes: memory of its passes.
        process: bytes of the process before it loads a model.
    """
    published = parameters * (2 if settings.model.dtype == "bfloat16" else 4)
    return TrainerMemory(
        process=process,
        weights=weight_bytes(settings, parameters, trained),
        optimizer=12.0 * trained,
        copies=0.0 if settings.publishes_adapters else 2.0 * published,
        passes=with_heap_gaps(settings, passes),
        longest=settings.max_model_len,
    )


def weight_bytes(settings: Settings, parameters: int, trained: int) -> float:
    """Return the bytes of the policy's weights, and of a reference policy that is a model of its own."""
    if settings.lora.rank:
        width = 2 if settings.model.dtype == "bfloat16" else 4
        return float((parameters - trained) * width + trained * 4)
    return 4.0 * parameters * (2 if settings.algorithm.kl_coefficient else 1)


def rough_passes(settings: Settings, shape: ModelShape) -> PassMemory | None:
    """Return an upper bound of the memory of passes; None for an architecture of which none is known.

    A layer of a Llama stores about 12 hidden states and 4 intermediate ones for each token, in float32. The bound has
    twice as many, and keys and values once more for each row of a group that shares a prompt.
    """
    if not shape.is_plain or settings.train.attention == "eager":
        return None
    numbers = 24 * (shape.hidden + shape.query_size) / 2 + 8 * shape.intermediate
    numbers += 2 * shape.key_value_size * min(settings.rollout.group_size, 64)
    if settings.lora.rank:
        numbers += 4 * (shape.hidden + shape.intermediate)
    scores = 8.0 * shape.layers  # bytes of the masks of a tree's branches
    new_gradients = 0.0 if settings.lora.rank else 8.0 * shape.vocabulary * shape.hidden
    return PassMemory(
        constant=_LOGITS_BYTES + new_gradients + (0.0 if settings.model.dtype == "float32" else new_gradients),
        per_token=4.0 * numbers * shape.layers,
        per_token_and_length=scores,
    )


def with_heap_gaps(settings: Settings, passes: PassMemory) -> PassMemory:
    """Return the memory of passes on a CPU, with the gaps that the heap has between blocks if there is an adapter.

    An adapter stores many small tensors between large ones that are freed at once, and the C library (glibc 2.36) gives
    such gaps neither back nor to blocks of other sizes. Without an adapter the gaps are small. Recomputed layers leave
    as large ones.
    """
    shape = ModelShape.read(Path(settings.model.path))
    bound = None if shape is None else rough_passes(settings, shape)
    if bound is None or not settings.lora.rank:
        return passes
    width = 0.5 if settings.model.dtype == "bfloat16" else 1.0  # the bound is that of float32
    return replace(passes, gaps_per_token=_HEAP_GAPS * width * bound.per_token)


class OtherProcesses(Struct, frozen=True, kw_only=True):
    """Bytes that the other processes of a run need in main memory, if one machine runs them all."""

    engines: float
    roles: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.engines + self.roles


_ROLE_BYTES: Final[Mapping[str, int]] = {
    "supervisor": 60 << 20,
    "feed": 120 << 20,
    "rollout": 170 << 20,
    "score": 120 << 20,
    "dashboard": 60 << 20,
    "redis": 40 << 20,
}
"""Memory of each process. In one run with short episodes and a trivial reward `smaps_rollup` showed resident MiB: feed
53, rollout 75, score 53, server 15, supervisor and dashboard 50; with reasoning-gym's environments 118, 173, 120. The
figures are chosen above that. What else environments and rewards of a project load is not counted.
"""
_ENGINE_BYTES: Final = 380 << 20
"""Memory of a local engine before it has loaded a model; estimated."""
_VLLM_BYTES: Final = 3 << 30
"""Main memory of a vLLM, its cache on a CPU included; estimated."""


def other_processes(settings: Settings, parameters: int, shape: ModelShape | None) -> OtherProcesses:
    """Return what the run's processes other than the trainer need on a machine that runs all of them."""
    roles = _ROLE_BYTES["supervisor"] + _ROLE_BYTES["feed"]
    roles += settings.rollout.workers * _ROLE_BYTES["rollout"] + settings.score.workers * _ROLE_BYTES["score"]
    roles += 0 if settings.run.dashboard == "off" else _ROLE_BYTES["dashboard"]
    roles += 0 if settings.run.redis else _ROLE_BYTES["redis"]
    return OtherProcesses(engines=_engine_bytes(settings, parameters, shape), roles=float(roles))


def _engine_bytes(settings: Settings, parameters: int, shape: ModelShape | None) -> float:
    engine, width = settings.engine, 2 if settings.model.dtype == "bfloat16" else 4
    if engine.urls:
        return 0.0
    if engine.server == "vllm":
        return float(engine.count * (_VLLM_BYTES + parameters * width))
    cache = float(engine_cache_bytes(engine.max_cache_bytes))
    if shape is not None:
        cache = min(cache, shape.cache_bytes(2 * engine.max_batch_size * settings.max_model_len, width))
    copies = 2.0  # new weights are read beside the old ones
    if settings.publishes_adapters and width == 4 and shape is not None and shape.is_bfloat16:
        copies = 1.5  # adapters are added to a base that is kept as it is in the file
    return engine.count * (_ENGINE_BYTES + copies * parameters * width + cache)
