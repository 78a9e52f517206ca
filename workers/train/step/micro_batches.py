"""Partition a batch into micro-batches."""

import torch
from torch import Tensor

from workers.train.step.batch import Batch


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
