"""Aggregations: how much each token contributes to the loss.

An aggregation gives each row a factor, computed once for the whole optimizer batch from its final masks; a part of the
batch then adds up its own tokens. So every partition into micro-batches or ranks gives the same loss and gradient. The
unit of the `seq-*` aggregations is the completion: a completion with two rows weighs no more than one with a single
row. Where a completion weighs by its tokens, `branch_weights` keeps the branches of an agent's conversation from making
it heavier.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.train.algorithms.registry import Registry


@dataclass(frozen=True, slots=True)
class BatchTotals:
    """Size of the whole optimizer batch over all micro-batches and ranks, after all masks."""

    tokens: float
    """Tokens that bear loss, each counted with its weight."""
    completions: int
    """Completions with such a token."""
    ranks: int = 1
    """Number of ranks if their gradients are averaged; 1 if they are summed, or with a single rank."""


AGGREGATIONS: Registry[None] = Registry(
    "aggregation",
    {
        "length_R": "int64, loss tokens of the row's completion, over all its rows",
        "weight_R": "float64, weight of each loss token of the row: below 1 if its completion branched",
        "totals": "BatchTotals of the whole optimizer batch",
    },
)
"""Aggregations by the name in `[algorithm] aggregation`. Each returns float64, the factor of a row's loss tokens."""


def row_factors(
    name: str, length_R: Tensor, totals: BatchTotals, *, constant: float = 1.0, weight_R: Tensor | None = None
) -> Tensor:
    """Return the factor of each row's loss tokens; the loss is the sum of factor times token loss.

    Args:
        name: of the aggregation.
        length_R: int64, loss tokens of the row's completion in the whole batch.
        totals: of the whole batch; all zero if nothing is valid, and then every factor is 0.
        constant: divisor of a completion's sum under `seq-mean-token-sum-norm`.
        weight_R: float64, weight of each loss token of the row (`branch_weights`); 1 by default.
    """
    weight_R = torch.ones_like(length_R, dtype=torch.float64) if weight_R is None else weight_R
    inputs = {"length_R": length_R, "totals": totals, "weight_R": weight_R}
    factors_R: Tensor = AGGREGATIONS[name](inputs, {"constant": constant})
    return torch.where(length_R > 0, factors_R, 0.0) * totals.ranks


@AGGREGATIONS.register("token-mean", None, formula="sum_t l_t / N_tokens", source="Yu et al. 2025, DAPO")
def token_mean(weight_R: Tensor, totals: BatchTotals) -> Tensor:
    """Weigh every token of the batch equally, but for the weights of branched completions."""
    return weight_R / max(totals.tokens, 1)


@AGGREGATIONS.register("token-sum", None, formula="sum_t l_t", source="verl core_algos.agg_loss")
def token_sum(weight_R: Tensor) -> Tensor:
    """Sum without a divisor: the loss grows with the batch."""
    return weight_R


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
def seq_mean_token_sum(weight_R: Tensor, totals: BatchTotals) -> Tensor:
    """Weigh a completion by its length."""
    return weight_R / max(totals.completions, 1)


@AGGREGATIONS.register(
    "seq-mean-token-sum-norm",
    None,
    formula="mean over completions of sum_t l_t / constant",
    source="Liu et al. 2025, Dr. GRPO, arXiv:2503.20783",
)
def seq_mean_token_sum_norm(weight_R: Tensor, totals: BatchTotals, *, constant: float) -> Tensor:
    """Divide each completion's sum by a constant, such as the maximum completion length, instead of by its length."""
    return weight_R / (max(totals.completions, 1) * constant)


def branch_weights(tokens_CW: Tensor, main_CW: Tensor) -> Tensor:
    """Return the weight of each completion's loss tokens with `agents.weight = "rollout"`.

    A completion then weighs as much as the loss tokens of its main branches, however many others it has. Without a loss
    token in these it weighs as much as its other branches on average.

    Args:
        tokens_CW: int64, loss tokens of each branch.
        main_CW: bool, branches of role main; the only one of a completion without branches is one.

    Returns:
        float64 (C), above 0 and at most 1; 1 for a completion without loss tokens.
    """
    all_C = tokens_CW.sum(dim=1).double()
    main_C = torch.where(main_CW, tokens_CW, 0).sum(dim=1).double()
    average_C = all_C / (tokens_CW > 0).sum(dim=1).clamp(min=1)
    return torch.where(all_C > 0, torch.where(main_C > 0, main_C, average_C) / all_C.clamp(min=1), 1.0)
