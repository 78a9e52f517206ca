"""Partition of a batch into micro-batches: of rows apart, or of rows that share their prefixes."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from workers.train.model.prefix_tree import PrefixTree, Tokens, common_prefix, count_places, row_key
from workers.train.step.batch import Batch

MIN_SHARED: Final = {"cpu": 0.1}
"""Least fraction of shared tokens for which `auto` makes trees, by type of device. On two cores trees were as fast
as rows apart at 4 %, and 1 to 9 % faster from 7 % on.
"""
_MIN_SHARED_ELSEWHERE: Final = 0.25
"""The same for other devices; chosen, not measured."""


class MicroBatch(NamedTuple):
    """Rows of one forward pass."""

    rows: Tensor
    """int64, row numbers."""
    tree: PrefixTree | None = None
    """The prefix tree of these rows, on the device of the batch; None if they run apart."""


class MicroBatches(NamedTuple):
    """A batch in micro-batches."""

    parts: list[MicroBatch]
    tokens: int
    """Tokens of the rows, without padding."""
    forwarded: int
    """Tokens of one pass over the rows, without padding; less than `tokens` if rows share their prefixes."""


def plan_micro_batches(
    batch: Batch, micro_batch_tokens: int, rows_R: Tensor, *, packed: bool, share: str = "off"
) -> MicroBatches:
    """Partition rows into micro-batches, as prefix trees where that pays.

    Args:
        batch: the rows.
        micro_batch_tokens: maximum, see `split_micro_batches` and `split_trees`.
        rows_R: bool, the rows to partition.
        packed: True if rows that run apart are not padded.
        share: `train.share_history`; `off` for a model that cannot share.
    """
    chosen = rows_R.nonzero().squeeze(1)
    numbers, lengths = chosen.tolist(), batch.lengths_R[chosen].tolist()
    total = sum(lengths)
    if share != "off" and numbers:
        tokens_MT = batch.tokens_RT[chosen].cpu().numpy()
        rows = {number: tokens_MT[i, : lengths[i]] for i, number in enumerate(numbers)}
        least = 0.0 if share == "on" else MIN_SHARED.get(batch.tokens_RT.device.type, _MIN_SHARED_ELSEWHERE)
        if 1 - count_places([*rows.values()]) / total >= least:
            completions = dict(zip(numbers, batch.completion_ids_R[chosen].tolist(), strict=True))
            split = split_trees(rows, completions, micro_batch_tokens)
            forwarded = sum(count_places([rows[number] for number in part]) for part in split)
            if 1 - forwarded / total >= least:  # cut groups share less
                return MicroBatches([_make_tree(rows, part, chosen.device) for part in split], total, forwarded)
    apart = split_micro_batches(batch, micro_batch_tokens, rows_R, packed=packed)
    return MicroBatches([MicroBatch(part) for part in apart], total, total)


def _make_tree(rows: dict[int, Tokens], part: Sequence[int], device: torch.device) -> MicroBatch:
    tree = PrefixTree.from_rows([rows[number] for number in part]).to(device)
    return MicroBatch(torch.tensor(part).to(device, non_blocking=True), tree)


def split_trees(rows: dict[int, Tokens], completions: dict[int, int], micro_batch_tokens: int) -> list[list[int]]:
    """Partition rows into micro-batches with a bounded number of distinct prefixes.

    All rows of a completion stay together, because some losses look at whole completions. Completions are dealt in
    lexicographic order of their first rows, so completions of a group are neighbours, and so are groups that begin
    alike. A group over the bound is cut between completions; a completion over the bound gets a micro-batch of its own.

    Args:
        rows: tokens of each row, by its number.
        completions: the completion of each row, by its number.
        micro_batch_tokens: maximum number of places of a micro-batch's tree.

    Returns:
        Row numbers of each micro-batch.
    """
    members: dict[int, list[int]] = {}
    for number in sorted(rows, key=lambda number: row_key(rows[number])):
        members.setdefault(completions[number], []).append(number)
    parts: list[list[int]] = []
    tree: list[tuple[bytes, int]] = []
    places = 0
    for numbers in members.values():
        more = _added_places(tree, rows, numbers)
        if not parts or places + more > micro_batch_tokens:
            parts.append([])
            tree, places = [], 0
            more = _added_places(tree, rows, numbers)
        parts[-1] += numbers
        places += more
    return parts


def _added_places(tree: list[tuple[bytes, int]], rows: dict[int, Tokens], numbers: Sequence[int]) -> int:
    """Add rows to a sorted list of rows; return the number of prefixes that are new in it."""
    added = 0
    for number in numbers:
        entry = (row_key(rows[number]), number)
        at = bisect_left(tree, entry)
        neighbours = [rows[other] for _, other in tree[max(at - 1, 0) : at + 1]]
        added += len(rows[number]) - max((common_prefix(rows[number], row) for row in neighbours), default=0)
        tree.insert(at, entry)
    return added


def split_micro_batches(
    batch: Batch, micro_batch_tokens: int, rows_R: Tensor | None = None, *, packed: bool = False
) -> list[Tensor]:
    """Partition rows into micro-batches with a bounded number of tokens.

    All rows of a completion stay together, because some losses look at whole completions. Completions are sorted by
    their longest row and packed in that order, which keeps padding small; a completion over the bound gets a
    micro-batch of its own.

    Args:
        batch: the rows.
        micro_batch_tokens: maximum, counted with padding: rows times the longest row's length.
        rows_R: bool, the rows to partition; all by default.
        packed: True if rows are not padded, so that their own lengths count.

    Returns:
        Row numbers (int64) of each micro-batch.
    """
    everything_R = torch.arange(len(batch.lengths_R), device=batch.lengths_R.device)
    chosen = everything_R if rows_R is None else everything_R[rows_R]
    if not len(chosen):
        return []
    _, codes, counts_S = torch.unique(batch.completion_ids_R[chosen], return_inverse=True, return_counts=True)
    longest_S = torch.zeros_like(counts_S).scatter_reduce(0, codes, batch.lengths_R[chosen], "amax")
    order_S = torch.argsort(longest_S, descending=True, stable=True)
    totals_S = torch.zeros_like(counts_S).index_add_(0, codes, batch.lengths_R[chosen])
    sizes: list[int] = []
    tokens = longest = 0
    for length, rows, total in zip(*(x[order_S].tolist() for x in (longest_S, counts_S, totals_S)), strict=True):
        more = total if packed else rows * longest
        if sizes and tokens + more <= micro_batch_tokens:
            sizes[-1] += rows
            tokens += more
        else:
            longest = max(length, 1)
            tokens = total if packed else rows * longest
            sizes.append(rows)
    rank_S = torch.argsort(order_S)
    return list(torch.split(chosen[torch.argsort(rank_S[codes], stable=True)], sizes))
