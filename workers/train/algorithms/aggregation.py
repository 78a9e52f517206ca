"""Aggregations: how much each token contributes to the loss.

An aggregation gives each row a factor, computed once for the whole optimizer batch from its final masks; a part of the
batch then adds up its own tokens. So every partition into micro-batches or ranks gives the same loss and gradient. The
unit of the `seq-*` aggregations is the completion: a completion with two rows weighs no more than one with a single
row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.train.algorithms.registry import Registry


@dataclass(frozen=True, slots=True)
class BatchTotals:
    """Size of the whole optimizer batch over all micro-batches and ranks, after all masks."""

    tokens: int
    """Tokens that bear loss."""
    completions: int
    """Completions with such a token."""
    ranks: int = 1
    """Number of ranks if their gradients are averaged; 1 if they are summed, or with a single rank."""


AGGREGATIONS: Registry[None] = Registry(
    "aggregation",
    {
        "length_R": "int64, loss tokens of the row's completion, over all its rows",
        "totals": "BatchTotals of the whole optimizer batch",
    },
)
"""Aggregations by the name in `[algorithm] aggregation`. Each returns float64, the factor of a row's loss tokens."""


def row_factors(name: str, length_R: Tensor, totals: BatchTotals, *, constant: float = 1.0) -> Tensor:
    """Return the factor of each row's loss tokens; the loss is the sum of factor times token loss.

    Args:
        name: of the aggregation.
        length_R: int64, loss tokens of the row's completion in the whole batch.
        totals: of the whole batch; all zero if nothing is valid, and then every factor is 0.
        constant: divisor of a completion's sum under `seq-mean-token-sum-norm`.
    """
    factors_R: Tensor = AGGREGATIONS[name]({"length_R": length_R, "totals": totals}, {"constant": constant})
    return torch.where(length_R > 0, factors_R, 0.0) * totals.ranks


@AGGREGATIONS.register("token-mean", None, formula="sum_t l_t / N_tokens", source="Yu et al. 2025, DAPO")
def token_mean(length_R: Tensor, totals: BatchTotals) -> Tensor:
    """Weigh every token of the batch equally."""
    return torch.full_like(length_R, 1 / max(totals.tokens, 1), dtype=torch.float64)


@AGGREGATIONS.register("token-sum", None, formula="sum_t l_t", source="verl core_algos.agg_loss")
def token_sum(length_R: Tensor) -> Tensor:
    """Sum without a divisor: the loss grows with the batch."""
    return torch.ones_like(length_R, dtype=torch.float64)


@AGGREGATIONS.register(
    "seq-mean-token-mean",
    None,
    formula="mean over completions of mean_t l_t",
    source="Shao et al. 2024, arXiv:2402.03300, eq. 3",
)
def seq_mean_token_mean(length_R: Tensor, totals: BatchTotals) -> Tensor:
    """Weigh every completion equally, so a token of a long completion weighs less."""
    return 1 / (length_R.clamp(min=1).double() * max(totals.completions, 1))


@AGGREGATIONS.register(
    "seq-mean-token-sum",
    None,
    formula="mean over completions of sum_t l_t",
    source="verl core_algos.agg_loss",
)
def seq_mean_token_sum(length_R: Tensor, totals: BatchTotals) -> Tensor:
    """Weigh a completion by its length."""
    return torch.full_like(length_R, 1 / max(totals.completions, 1), dtype=torch.float64)


@AGGREGATIONS.register(
    "seq-mean-token-sum-norm",
    None,
    formula="mean over completions of sum_t l_t / constant",
    source="Liu et al. 2025, Dr. GRPO, arXiv:2503.20783",
)
def seq_mean_token_sum_norm(length_R: Tensor, totals: BatchTotals, *, constant: float) -> Tensor:
    """Divide each completion's sum by a constant, such as the maximum completion length, instead of by its length."""
    return torch.full_like(length_R, 1 / (max(totals.completions, 1) * constant), dtype=torch.float64)
