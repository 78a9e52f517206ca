"""Choice of a model's attention implementation, and whether its rows can be packed.

Packed rows may leak into one another: a recurrent state or a convolution runs into the next row, or an attention
implementation ignores row bounds. So every model is tested when it is loaded: a few short rows run packed and apart,
and packed again with a different first row.

Attention over packed rows, each of which attends only to itself.

Registered with transformers as `varlen`. On a GPU in half precision it is `torch.nn.attention.varlen`, torch's own
flash attention; elsewhere rows are processed one by one, which is as exact and needs no mask of all tokens by all
tokens. Padded rows are processed the same way.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

import structlog
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from stream.errors import SettingsError
from workers.settings import TrainSettings
from workers.train.model.logprobs import LogprobModel, token_logprobs

log = structlog.get_logger()

FLASH: Final = ("flash_attention_2", "flash_attention_3")
"""From the package `flash-attn`: half precision on GPUs only."""
TRIAL_LENGTHS: Final = (7, 12, 5)
"""Lengths of the trial rows."""
PACKED_TOLERANCE: Final = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest difference between packed rows and the same rows apart: relative norm per hidden state."""
LEAK_TOLERANCE: Final = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-3}
"""Largest effect of another first row on later rows; not exactly 0, because kernels are chosen by shape."""


def set_attention(read: LogprobModel, train: TrainSettings, dtype: torch.dtype) -> LogprobModel:
    """Set the model's attention implementation.

    Args:
        read: the model.
        train: the settings.
        dtype: bfloat16 under autocast, otherwise the dtype of the weights.

    Returns:
        The model with `packed` set.

    Raises:
        SettingsError: this model does not support the requested attention or packing on this device.
    """
    model = read.model
    own = model.config._attn_implementation  # noqa: SLF001
    reasons = []
    for name in _candidates(train, str(own), dtype, model.device):
        reason = _switch_attention(model, name) or packing_problem(read, own, name, dtype)
        if not reason:
            log.info("packing.enabled", attention=name, model=type(model).__name__)
            return read._replace(packed=True)
        reasons.append(f"{name}: {reason}")
        _switch_attention(model, own)
    if train.packing == "on":
        raise SettingsError(
            f"train.packing is 'on', but {type(model).__name__} gives other results for packed rows than for the "
            "same rows apart "
            f"({'; '.join(reasons)}); set train.packing to 'auto' or 'off', or try another train.attention"
        )
    if reasons:
        log.warning("packing.disabled", reasons=reasons, model=type(model).__name__)
    if train.attention != "auto" and (reason := _switch_attention(model, train.attention)):
        raise SettingsError(
            f"train.attention = {train.attention!r}: {reason}; set it to 'auto' or another implementation"
        )
    return read._replace(packed=False)


def packing_problem(read: LogprobModel, own: str, name: str, dtype: torch.dtype) -> str:
    """Return why rows cannot be packed under this attention, or an empty string; leave the model with it.

    Args:
        read: the model.
        own: the attention implementation for the rows apart.
        name: the attention implementation to test.
        dtype: as in `set_attention`.
    """
    model = read.model
    widths = torch.tensor(TRIAL_LENGTHS, device=model.device)
    vocabulary = int(model.get_input_embeddings().num_embeddings)
    generator = torch.Generator().manual_seed(0)
    tokens_MT = torch.randint(vocabulary, (len(TRIAL_LENGTHS), max(TRIAL_LENGTHS)), generator=generator).to(
        model.device
    )
    other_MT = tokens_MT.clone()
    other_MT[0] = (tokens_MT[0] + 1) % vocabulary
    weights = next(model.parameters()).dtype
    # flash-attn supports half precision only; others are tested in full precision too, which shows what rounding hides.
    # Sharded models in mixed precision always compute in half precision.
    for kind in {dtype} if name in FLASH or read.sharded_root is not None else {weights, dtype}:
        try:
            _switch_attention(model, own)
            apart = _hidden_states(read._replace(packed=False), tokens_MT, widths, kind)
            _switch_attention(model, name)
            packed, other = (_hidden_states(read._replace(packed=True), t, widths, kind) for t in (tokens_MT, other_MT))
        except (RuntimeError, ValueError, TypeError) as error:  # kernels reject a device or dtype with any of these
            return f"it fails: {error}"
        first = TRIAL_LENGTHS[0] - 1
        if not _max_relative_difference(packed, apart) <= PACKED_TOLERANCE[kind]:
            return f"packed rows are off by {_max_relative_difference(packed, apart):.1e} in {kind}"
        if not _max_relative_difference(other[first:], packed[first:]) <= LEAK_TOLERANCE[kind]:
            difference = _max_relative_difference(other[first:], packed[first:])
            return f"a row sees the one before it, by {difference:.1e} in {kind}"
    return ""


def _candidates(train: TrainSettings, own: str, dtype: torch.dtype, device: torch.device) -> Iterator[str]:
    """Yield attention implementations to try for packing, best first; none if rows are to be padded."""
    if train.packing == "off":
        return
    if train.attention != "auto":
        if train.packing == "on" or train.attention in {NAME, *FLASH}:
            yield train.attention
        return
    from transformers.utils import is_flash_attn_2_available

    fast = device.type == "cuda" and dtype == torch.bfloat16
    if train.packing == "on" or fast:
        yield NAME
    if fast and is_flash_attn_2_available():
        yield FLASH[0]
    if train.packing == "on":
        yield own


def _switch_attention(model: Any, name: str) -> str:
    """Switch the attention implementation; return why the model does not support it, or an empty string."""
    register()
    if name == NAME and not getattr(model, "_supports_flash_attn", False):
        return f"{type(model).__name__} needs masks"
    try:
        model.set_attn_implementation(name)
    except (ValueError, ImportError) as error:
        return str(error)
    found = model.config._attn_implementation  # noqa: SLF001
    return "" if found == name else f"{type(model).__name__} stays with {found}"


def _hidden_states(read: LogprobModel, tokens_MT: Tensor, lengths_M: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the hidden state before each token except a row's first, or log-probs if there are no hidden states."""
    places_T = torch.arange(tokens_MT.shape[1], device=tokens_MT.device)
    chosen_MT = (places_T > 0) & (places_T < lengths_M.unsqueeze(1))
    cast = torch.autocast(tokens_MT.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)
    with torch.no_grad(), cast:
        found = token_logprobs(read, tokens_MT, chosen_MT, temperature=1.0, lengths_M=lengths_M)
    states = found.logprobs_N.unsqueeze(1) if found.hidden_NH is None else found.hidden_NH
    return states.to(torch.promote_types(states.dtype, torch.float32))


def _max_relative_difference(found_NH: Tensor, expected_NH: Tensor) -> float:
    """Return the largest relative difference of a token; NaN if any is NaN."""
    return float(((found_NH - expected_NH).norm(dim=1) / expected_NH.norm(dim=1).clamp(min=1e-12)).max())


NAME: Final = "varlen"
"""Name in `train.attention` and in transformers."""


def register() -> None:
    """Register with transformers; idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register(NAME, varlen_attention)
    AttentionMaskInterface.register(
        NAME, flash_attention_mask
    )  # it makes no mask, because row bounds are passed separately


def varlen_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention with the signature that transformers calls.

    Args:
        module: the layer.
        query: [rows, heads, tokens, size]; a single row if rows are packed.
        key: as the query, possibly with fewer heads.
        value: as the key.
        attention_mask: None, because neither packed nor right-padded rows need one.
        scaling: of the scores.
        sliding_window: number of tokens that a token attends to, including itself.
        cu_seq_lens_q: int32, starts of packed rows and the end of the last; None if rows are not packed.
        others: `max_length_q`, the longest packed row, and arguments of other attention implementations.

    Returns:
        [rows, tokens, heads, size], and no weights.

    Raises:
        ValueError: the model uses a feature that this attention lacks.
    """
    causal = others.get("is_causal", getattr(module, "is_causal", True))
    used = [name for name in ("dropout", "softcap", "s_aux", "position_bias") if not _is_unset(others.get(name))]
    used += ["attention_mask"] * (attention_mask is not None) + ["is_causal = False"] * (causal is False)
    if used:
        raise ValueError(f"attention 'varlen' has no {', '.join(used)}")
    rows, heads, length, _ = query.shape
    longest = int(others.get("max_length_q") or length)
    if cu_seq_lens_q is None:
        cu_seq_lens_q = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=query.device)
        longest = length
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if query.is_cuda and query.dtype in {torch.bfloat16, torch.float16}:
        out = _attend_packed(query, key, value, cu_seq_lens_q, longest, scaling, sliding_window)
    else:
        spans = [slice(*pair) for pair in pairwise(cu_seq_lens_q.tolist())]
        out = torch.cat([_attend_row(query[s], key[s], value[s], scaling, sliding_window) for s in spans])
    return out.view(rows, length, heads, -1), None


def _attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Attend over all rows, [tokens, heads, size], with torch's flash attention."""
    result = varlen_attn(
        query,
        key,
        value,
        bounds,
        bounds,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=key.shape[1] != query.shape[1],
    )
    return result if isinstance(result, Tensor) else result[0]


def _attend_row(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """Attend over one row, [tokens, heads, size]."""
    seen = None
    if window is not None and window < len(query):
        ones = torch.ones(len(query), len(query), dtype=torch.bool, device=query.device)
        seen = ones.tril() & ones.triu(1 - window)
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    fewer = query.shape[1] != key.shape[1]
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=seen, is_causal=seen is None, scale=scaling, enable_gqa=fewer
    )
    return out.squeeze(0).transpose(0, 1)


def _is_unset(asked: Any) -> bool:
    return asked is None or (isinstance(asked, float | int) and not asked)
