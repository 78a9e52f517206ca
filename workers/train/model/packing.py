"""Choice of a model's attention implementation, and whether its rows can be packed.

Packed rows may leak into one another: a recurrent state or a convolution runs into the next row, or an attention
implementation ignores row bounds. So every model is tested when it is loaded: a few short rows run packed and apart,
and packed again with a different first row.
"""

from collections.abc import Iterator
from typing import Any, Final

import structlog
import torch
from torch import Tensor

from stream.errors import SettingsError
from workers.settings import Train
from workers.train.model import varlen
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


def set_attention(read: LogprobModel, train: Train, dtype: torch.dtype) -> LogprobModel:
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


def _candidates(train: Train, own: str, dtype: torch.dtype, device: torch.device) -> Iterator[str]:
    """Yield attention implementations to try for packing, best first; none if rows are to be padded."""
    if train.packing == "off":
        return
    if train.attention != "auto":
        if train.packing == "on" or train.attention in {varlen.NAME, *FLASH}:
            yield train.attention
        return
    from transformers.utils import is_flash_attn_2_available

    fast = device.type == "cuda" and dtype == torch.bfloat16
    if train.packing == "on" or fast:
        yield varlen.NAME
    if fast and is_flash_attn_2_available():
        yield FLASH[0]
    if train.packing == "on":
        yield own


def _switch_attention(model: Any, name: str) -> str:
    """Switch the attention implementation; return why the model does not support it, or an empty string."""
    varlen.register()
    if name == varlen.NAME and not getattr(model, "_supports_flash_attn", False):
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
