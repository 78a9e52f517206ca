"""Choice of a model's attention implementation: whether its rows can be packed, and share their prefixes.

Packed rows may leak into one another: a recurrent state or a convolution runs into the next row, or an attention
implementation ignores row bounds. A state that is carried from token to token cannot branch either. So every model is
tested when it is loaded: a few short rows run together and apart, and together again with a different first row.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
import structlog
import torch
from torch import Tensor

from stream.errors import SettingsError
from workers.settings import TrainSettings
from workers.train.model.attention_kernels import TREE, VARLEN, switch_attention
from workers.train.model.logprobs import LogprobModel, token_logprobs
from workers.train.model.prefix_tree import PrefixTree

log = structlog.get_logger()

FLASH: Final = ("flash_attention_2", "flash_attention_3")
"""From the package `flash-attn`: half precision on GPUs only."""
TRIAL_LENGTHS: Final = (7, 12, 5)
"""Lengths of the trial rows."""
TRIAL_BRANCHES: Final = ((0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 6, 7), (0, 1, 8, 9), (0, 1, 8), (10, 11, 12))
"""Trial rows of a prefix tree: they branch at two depths, one is the beginning of another, one shares nothing."""
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
        The model with `packed`, `row_attention` and `can_share` set.

    Raises:
        SettingsError: this model does not support the requested attention, packing or sharing on this device.
    """
    read = _choose_row_attention(read, train, dtype)
    read = read._replace(row_attention=read.model.config._attn_implementation)  # noqa: SLF001
    if train.share_history == "off":
        return read
    reason = sharing_problem(read, dtype)
    switch_attention(read.model, read.row_attention)
    if reason and train.share_history == "on":
        raise SettingsError(
            f"train.share_history is 'on', but {type(read.model).__name__} gives other results for rows that share "
            f"their prefixes than for the same rows apart ({reason}); set train.share_history to 'auto' or 'off'"
        )
    if reason:
        log.warning("history.not_shared", reason=reason, model=type(read.model).__name__)
    return read._replace(can_share=not reason)


def _choose_row_attention(read: LogprobModel, train: TrainSettings, dtype: torch.dtype) -> LogprobModel:
    """Set the attention implementation for rows that share nothing; return the model with `packed` set."""
    model = read.model
    own = model.config._attn_implementation  # noqa: SLF001
    reasons = []
    for name in _candidates(train, str(own), dtype, model.device):
        reason = switch_attention(model, name) or packing_problem(read, own, name, dtype)
        if not reason:
            log.info("packing.enabled", attention=name, model=type(model).__name__)
            return read._replace(packed=True)
        reasons.append(f"{name}: {reason}")
        switch_attention(model, own)
    if train.packing == "on":
        raise SettingsError(
            f"train.packing is 'on', but {type(model).__name__} gives other results for packed rows than for the "
            "same rows apart "
            f"({'; '.join(reasons)}); set train.packing to 'auto' or 'off', or try another train.attention"
        )
    if reasons:
        log.warning("packing.disabled", reasons=reasons, model=type(model).__name__)
    if train.attention != "auto" and (reason := switch_attention(model, train.attention)):
        raise SettingsError(
            f"train.attention = {train.attention!r}: {reason}; set it to 'auto' or another implementation"
        )
    return read._replace(packed=False)


def sharing_problem(read: LogprobModel, dtype: torch.dtype) -> str:
    """Return why rows cannot share their prefixes, or an empty string; leave the model with any attention.

    Args:
        read: the model, with `row_attention`.
        dtype: as in `set_attention`.
    """
    vocabulary = int(read.model.get_input_embeddings().num_embeddings)
    # In ascending order, so that the row that is changed comes before all others in the tree.
    tokens = np.sort(np.random.default_rng(0).permutation(max(vocabulary, 20))[:20] % vocabulary)
    rows = [tokens[list(places)] for places in TRIAL_BRANCHES]
    changed = [np.append(rows[0][:-2], tokens[13:15]), *rows[1:]]
    if problem := switch_attention(read.model, TREE):
        return problem
    weights = next(read.model.parameters()).dtype
    first = len(rows[0]) - 1
    for kind in {dtype} if read.sharded_root is not None else {weights, dtype}:
        try:
            apart = _branch_states(read._replace(packed=False), rows, kind, shared=False)
            shared, other = (_branch_states(read, each, kind, shared=True) for each in (rows, changed))
        except (RuntimeError, ValueError, TypeError) as error:  # as in `packing_problem`
            return f"it fails: {error}"
        if not (difference := _max_relative_difference(shared, apart)) <= PACKED_TOLERANCE[kind]:
            return f"rows that share their prefixes are off by {difference:.1e} in {kind}"
        if not (difference := _max_relative_difference(other[first:], shared[first:])) <= LEAK_TOLERANCE[kind]:
            return f"a row sees what follows a shared prefix in another row, by {difference:.1e} in {kind}"
    return ""


def _branch_states(read: LogprobModel, rows: list[np.ndarray], dtype: torch.dtype, *, shared: bool) -> Tensor:
    """Return what `_hidden_states` does for rows, as a prefix tree or apart."""
    device = read.model.device
    lengths_M = torch.tensor([len(row) for row in rows], device=device)
    tokens_MT = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True).to(device)
    tree = PrefixTree.from_rows(rows).to(device) if shared else None
    return _hidden_states(read._replace(can_share=True, tree=tree), tokens_MT, lengths_M, dtype)


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
            switch_attention(model, own)
            apart = _hidden_states(read._replace(packed=False), tokens_MT, widths, kind)
            switch_attention(model, name)
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
        if train.packing == "on" or train.attention in {VARLEN, *FLASH}:
            yield train.attention
        return
    from transformers.utils import is_flash_attn_2_available

    fast = device.type == "cuda" and dtype == torch.bfloat16
    if train.packing == "on" or fast:
        yield VARLEN
    if fast and is_flash_attn_2_available():
        yield FLASH[0]
    if train.packing == "on":
        yield own


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
