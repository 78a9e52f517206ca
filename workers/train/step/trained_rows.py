"""What a step did with every sampled token, as bytes for `stream.trainer.trained_tokens`."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stream.records import TrainedRow
from workers.train.algorithms.masks import NONE
from workers.train.step.prepared_batch import PreparedBatch

Values = NDArray[Any]
"""One value for each sampled token of a row."""


def trained_rows(prepared: PreparedBatch, *, trained: bool) -> list[tuple[TrainedRow, ...]]:
    """Return the rows of each completion of a batch, in order.

    Args:
        prepared: the batch, after its updates.
        trained: whether an update was made. Without one, old log-probs may be unknown.
    """
    sampled_RT = prepared.batch.sampled_RT
    columns = (
        _by_row(prepared.masks.loss_tokens_RT, sampled_RT, torch.uint8),
        _by_row(prepared.advantages.tokens_RT, sampled_RT, torch.float32),
        _by_row(_differences(prepared, trained=trained), sampled_RT, torch.float32),
        _by_row(prepared.masks.token_rejected_by_RT - NONE, sampled_RT, torch.uint8),
    )
    found: list[list[TrainedRow]] = [[] for _ in range(len(prepared.masks.loss_C))]
    for completion, *parts in zip(prepared.batch.completion_ids_R.tolist(), *columns, strict=True):
        found[completion].append(_row(*parts, names=prepared.masks.rules))
    return [tuple(rows) for rows in found]


def _differences(prepared: PreparedBatch, *, trained: bool) -> Tensor:
    """Return the old log-prob minus the engine's, NaN where no pass computed the former."""
    known_RT = prepared.masks.loss_tokens_RT
    if prepared.rejection is not None:
        known_RT = prepared.rejection.log_ratios.mask_RT
    elif prepared.statistics is None and not trained:
        known_RT = torch.zeros_like(known_RT)
    difference_RT = prepared.policies.old_logprobs_RT - prepared.batch.rollout_logprobs_RT
    return torch.where(known_RT, difference_RT, torch.nan)


def _by_row(values_RT: Tensor, sampled_RT: Tensor, dtype: torch.dtype) -> list[Values]:
    values_N = values_RT[sampled_RT].to("cpu", dtype).numpy()
    return np.split(values_N, sampled_RT.sum(dim=1).cumsum(0).tolist())[:-1]


def _row(mask: Values, advantages: Values, differences: Values, codes: Values, *, names: tuple[str, ...]) -> TrainedRow:
    """Return one row; `codes` are 0 or 1 + position in `names`."""
    masked = advantages[mask == 1]
    is_shared = len(masked) > 0 and bool((masked == masked[0]).all())
    rules: list[str] = []
    if codes.any():
        used, positions = np.unique(np.concatenate(([0], codes)), return_inverse=True)
        rules, codes = [names[code - 1] for code in used[1:]], positions[1:].astype(np.uint8)
    return TrainedRow(
        loss_mask=b"" if mask.all() else mask.tobytes(),
        advantages=(masked[:1] if is_shared else advantages).tobytes() if len(masked) else b"",
        logprob_differences=b"" if np.isnan(differences).all() else differences.tobytes(),
        rejected_by=codes.tobytes() if rules else b"",
        rules=tuple(rules),
    )
