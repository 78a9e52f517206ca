"""Aggregations: how much of the loss each token is.

Every aggregation is a factor to each row, made once for the whole optimizer batch from its final masks; a part of the
batch then adds up its own tokens' shares. So any partition into micro-batches or ranks gives the same loss and
gradient.
The unit of the `seq-*` ones is the completion: a completion with two rows weighs no more than one with a single row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.train.algorithms.registry import Registry


@dataclass(frozen=True, slots=True)
class BatchTotals:
    """What the whole optimizer batch holds, over all micro-batches and ranks, after all masks."""

    tokens: int
    """Tokens that bear loss."""
    completions: int
    """Completions with such a token."""
    ranks: int = 1
    """Ranks whose gradients will be averaged; 1 where they are added up, or where there is one."""


AGGREGATIONS: Registry[None] = Registry(
    "aggregation",
    {
        "length_R": "int64, loss tokens of the row's completion, over all its rows",
        "totals": "Totals of the whole optimizer batch",
    },
)
"""By name, as `[algorithm] aggregation` says it. Each returns float64, the factor of every loss token of a row."""


def row_factors(name: str, length_R: Tensor, totals: BatchTotals, *, constant: float = 1.0) -> Tensor:
    """The factor of each row's loss tokens; the loss is the sum of factor times loss over all of them.

    Args:
        name: of the aggregation.
        length_R: int64, loss tokens of the row's completion in the whole batch.
        totals: of the whole batch; all zero where nothing is valid, and then every factor is 0.
        constant: what `seq-mean-token-sum-norm` divides a completion's sum by.
    """
    found_R: Tensor = AGGREGATIONS[name]({"length_R": length_R, "totals": totals}, {"constant": constant})
    return torch.where(length_R > 0, found_R, 0.0) * totals.ranks


@AGGREGATIONS.register("token-mean", None, formula="sum_t l_t / N_tokens", source="Yu et al. 2025, DAPO")
def token_mean(length_R: Tensor, totals: BatchTotals) -> Tensor:
    """Every token of the batch weighs the same."""
    return torch.full_like(length_R, 1 / max(totals.tokens, 1), dtype=torch.float64)


@AGGREGATIONS.register("token-sum", None, formula="sum_t l_t", source="verl core_algos.agg_loss")
def token_sum(length_R: Tensor) -> Tensor:
    """Nothing is divided by: the loss grows with the batch."""
    return torch.ones_like(length_R, dtype=torch.float64)


@AGGREGATIONS.register(
    "seq-mean-token-mean",
    None,
    formula="mean over completions of mean_t l_t",
    source="Shao et al. 2024, arXiv:2402.03300, eq. 3",
)
def seq_mean_token_mean(length_R: Tensor, totals: BatchTotals) -> Tensor:
    """Every completion weighs the same, so a token of a long one weighs less."""
    return 1 / (length_R.clamp(min=1).double() * max(totals.completions, 1))


@AGGREGATIONS.register(
    "seq-mean-token-sum",
    None,
    formula="mean over completions of sum_t l_t",
    source="verl core_algos.agg_loss",
)
def seq_mean_token_sum(length_R: Tensor, totals: BatchTotals) -> Tensor:
    """A completion weighs as much as it is long."""
    return torch.full_like(length_R, 1 / max(totals.completions, 1), dtype=torch.float64)


@AGGREGATIONS.register(
    "seq-mean-token-sum-norm",
    None,
    formula="mean over completions of sum_t l_t / constant",
    source="Liu et al. 2025, Dr. GRPO, arXiv:2503.20783",
)
def seq_mean_token_sum_norm(length_R: Tensor, totals: BatchTotals, *, constant: float) -> Tensor:
    """The same, divided by a constant (the longest completion allowed, for one) instead of by any length."""
    return torch.full_like(length_R, 1 / (max(totals.completions, 1) * constant), dtype=torch.float64)
