"""The memory of one forward and backward pass over a model, found without weights and without computing.

The model is built from its configuration with fake tensors, which have shapes and no content, and passes over rows of
several sizes are made with them, with two layers and with four, since each layer adds the same. A dispatch mode sees
every tensor that an operation makes, and when it is freed. What kernels allocate within an operation is not seen.
"""

import copy
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from stream.errors import PenstockError
from workers.role.memory import PassMemory
from workers.settings import Settings
from workers.train.model.adapter import inject_adapter
from workers.train.model.attention_kernels import CAUSAL, TREE, switch_attention
from workers.train.model.lm_head import LMHead
from workers.train.model.logit_blocks import LogitTransform
from workers.train.model.logprobs import LogprobModel, lay_out_tree, logprobs_at
from workers.train.model.prefix_tree import PrefixTree
from workers.train.model.trainable_model import checkpoint_layers

_ROWS: Final = ((4, 256), (12, 256))
"""Number and length of the rows of each pass over rows apart."""
_LONG_ROWS: Final = (2, 1024)
"""Number and length of the rows of one more pass, for an attention that stores scores."""
_GROUPS: Final = (1, 2)
"""Number of groups of each pass over a prefix tree."""
_PROMPT: Final = 256
_RESPONSE: Final = 64
_LARGEST_GROUP: Final = 64
_READ_DEVICE: Final = torch.ops.prim.device.default


class UnmeasurableModelError(PenstockError):
    """A model cannot run with fake tensors."""


class MeasuredModel(NamedTuple):
    """What is known of a model without its weights."""

    parameters: int
    trained: int
    """Parameters that get gradients."""
    passes: PassMemory


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that are made while it is active, and the most of them that live at a time."""

    def __init__(self, known: Sequence[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: int = 0
        self.peak: int = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}  # noqa: SLF001

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count the tensors that it returns."""
        if func is _READ_DEVICE:  # a third of all calls, and none of them makes a tensor
            return args[0].fake_device
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        identity, size = storage._cdata, storage.nbytes()  # noqa: SLF001
        if identity in self._seen:
            return
        self._seen.add(identity)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, identity, size)

    def _forget(self, identity: int, size: int) -> None:
        self._seen.discard(identity)
        self.live -= size


def measure_model(settings: Settings, folder: Path, *, shares: bool = True) -> MeasuredModel:
    """Return the size of a model, and the memory of its passes with these settings.

    Args:
        settings: of the run.
        folder: of the model; only its configuration is read.
        shares: rows may run as the prefix tree that they share.

    Raises:
        UnmeasurableModelError: it cannot run so.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        few, many, layers = _layer_counts(config)
        with torch.enable_grad():
            fewer = _measure_model(settings, folder, config, few, shares=shares)
            if few == many:
                return fewer
            more = _measure_model(settings, folder, config, many, shares=shares)
        return _extrapolate(settings, fewer, more, (layers - many) / (many - few))
    except PenstockError:
        raise
    except Exception as error:  # a model's own code may raise what it likes without values
        raise UnmeasurableModelError(f"{folder}: {type(error).__name__}: {error}") from error


def _layer_counts(config: Any) -> tuple[int, int, int]:
    """Return two numbers of layers to measure, and that of the model.

    What a pass holds grows by the same number with every layer, if all layers are alike.
    """
    text = config.get_text_config()
    layers, kinds = int(text.num_hidden_layers), set(getattr(text, "layer_types", None) or [])
    return (2, 4, layers) if layers > 4 and len(kinds) <= 1 else (layers, layers, layers)


def _extrapolate(settings: Settings, fewer: MeasuredModel, more: MeasuredModel, factor: float) -> MeasuredModel:
    """Return the figures of a model with more layers: `factor` times the difference above the larger one.

    A small pass over few layers may hold most while the gradient of the vocabulary is new, which hides what layers add.
    So what a layer adds comes from the largest pass, and the constant from the larger model.
    """

    def line(low: float, high: float) -> float:
        return max(0.0, high + factor * (high - low))

    rows, length = _ROWS[-1]
    tokens, mixed = rows * length, settings.model.dtype == "bfloat16"
    copies = 2.0 * (more.trained - fewer.trained) if mixed else 0.0  # autocast keeps one of each trained weight
    growth = more.passes.per_token_and_length - fewer.passes.per_token_and_length
    added = more.passes.bytes_of(tokens, length) - fewer.passes.bytes_of(tokens, length) - copies
    return MeasuredModel(
        round(line(fewer.parameters, more.parameters)),
        round(line(fewer.trained, more.trained)),
        PassMemory(
            constant=more.passes.constant + factor * copies,
            per_token=more.passes.per_token + factor * (added / tokens - growth * length),
            per_token_and_length=line(fewer.passes.per_token_and_length, more.passes.per_token_and_length),
        ),
    )


def _measure_model(settings: Settings, folder: Path, config: Any, layers: int, *, shares: bool) -> MeasuredModel:
    """Measure a model with this number of layers."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    model = _build(settings, folder, config)
    parameters = [*model.model.parameters()]
    with FakeTensorMode(allow_non_fake_inputs=True) as fakes:
        _replace_by_fakes(model.model)
        return MeasuredModel(
            sum(parameter.numel() for parameter in parameters),
            sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
            _measure(settings, model, fakes, shares=shares),
        )


def _build(settings: Settings, folder: Path, config: Any) -> LogprobModel:
    """Return the model in training, without weights."""
    lora = settings.lora.rank
    dtype = torch.bfloat16 if lora and settings.model.dtype == "bfloat16" else torch.float32
    is_eager = settings.train.attention == "eager"
    own = {"attn_implementation": "eager"} if is_eager else {}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **own).eval()
        if not is_eager:
            switch_attention(model, CAUSAL)
        model.requires_grad_(requires_grad=not lora)
        if lora:
            inject_adapter(model, folder, settings.lora)
    if settings.train.gradient_checkpointing:
        checkpoint_layers(model)
    layer = model.get_output_embeddings()
    return LogprobModel(model, LMHead(layer, LogitTransform()) if isinstance(layer, torch.nn.Linear) else None)


def _replace_by_fakes(model: torch.nn.Module) -> None:
    """Replace all parameters and buffers by tensors without values on the CPU, with gradients; tied ones stay tied."""
    fakes: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):  # noqa: SLF001
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in fakes:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    if isinstance(tensor, torch.nn.Parameter):
                        fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
                        fake.grad = torch.zeros_like(fake) if tensor.requires_grad else None
                    fakes[id(tensor)] = fake
                tensors[name] = fakes[id(tensor)]  # type: ignore[assignment]


def _measure(settings: Settings, model: LogprobModel, fakes: FakeTensorMode, *, shares: bool) -> PassMemory:
    """Return the figures of rows apart, or of a tree where it takes more: straight lines through the passes."""
    apart = [(rows * length, _peak(settings, model, partial(_rows_apart, rows, length))) for rows, length in _ROWS]
    constant, per_token = _line(*apart)
    growth = 0.0
    if model.model.config._attn_implementation != CAUSAL:  # noqa: SLF001
        short, (rows, long) = _ROWS[0][1], _LONG_ROWS
        longest = _peak(settings, model, partial(_rows_apart, rows, long))
        growth = max(0.0, (longest - constant) / (rows * long) - per_token) / (long - short)
        per_token -= growth * short
    if shares and settings.train.share_history != "off" and not switch_attention(model.model, TREE):
        trees = [_make_tree(count, min(settings.rollout.group_size, _LARGEST_GROUP)) for count in _GROUPS]
        shared = [(len(tree.tokens_P), _peak(settings, model, partial(_tree_inputs, tree, fakes))) for tree in trees]
        constant, per_token = map(max, (constant, per_token), _line(*shared))
    return PassMemory(constant=max(0.0, constant), per_token=per_token, per_token_and_length=growth)


def _line(low: tuple[int, int], high: tuple[int, int]) -> tuple[float, float]:
    """Return constant and slope of the line through two passes, each with its tokens and its bytes."""
    slope = (high[1] - low[1]) / (high[0] - low[0])
    return low[1] - low[0] * slope, slope


Inputs = tuple[dict[str, Any], int]
"""Keyword arguments of the model, and the number of targets, which are the last places."""


def _rows_apart(rows: int, length: int) -> Inputs:
    return {"input_ids": torch.zeros(rows, length, dtype=torch.int64)}, rows * length


def _make_tree(groups: int, size: int) -> PrefixTree:
    """Return the tree of some groups, each with a prompt and `size` responses that share nothing else."""
    rows = []
    for group in range(groups):
        for row in range(size):
            own = np.arange(_RESPONSE) + 1_000_000 * (row + 1)
            rows.append(np.concatenate([np.arange(_PROMPT) + 100_000_000 * (group + 1), own]))
    return PrefixTree.from_rows(rows)


def _tree_inputs(tree: PrefixTree, fakes: FakeTensorMode) -> Inputs:
    fake = tree._replace(
        tokens_P=fakes.from_tensor(tree.tokens_P),
        depths_P=fakes.from_tensor(tree.depths_P),
        ends_P=fakes.from_tensor(tree.ends_P),
        places_MT=fakes.from_tensor(tree.places_MT),
    )
    return lay_out_tree(fake).inputs, len(tree.branches) * _RESPONSE


def _peak(settings: Settings, model: LogprobModel, make_inputs: Callable[[], Inputs]) -> int:
    """Return the most bytes, beside weights and gradients, that one pass forward and backward holds at a time."""
    inputs, count = make_inputs()
    weights = [*model.model.parameters(), *model.model.buffers()]
    known = weights + [each.grad for each in weights if each.grad is not None]
    bonus = settings.algorithm.entropy_coefficient > 0
    mixed = settings.model.dtype == "bfloat16"
    meter = LiveBytes(known)
    with meter:
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            outputs = logprobs_at(
                model,
                inputs,
                torch.zeros(count, dtype=torch.int64),
                torch.zeros(count, dtype=torch.int64),
                temperature=1.0,
                entropy="gradient" if bonus else "value",
            )
        outputs.logprobs_N.sum().backward()  # type: ignore[no-untyped-call]
        del outputs
    return meter.peak
