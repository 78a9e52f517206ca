"""pass@k: the probability that at least one of k attempts at a prompt is right."""

from typing import NamedTuple

import torch
from torch import Tensor


class PassAtK(NamedTuple):
    """Estimates, and which of them are defined."""

    value: Tensor
    """float64 in 0 ... 1; a meaningless 0.0 where not `known`."""
    known: Tensor
    """bool: there were at least k valid attempts. Take means over these only."""


def pass_at_k(n_valid: Tensor, n_correct: Tensor, k: int) -> PassAtK:
    """Estimate without bias the probability that at least one of k attempts is right: 1 - C(n - c, k) / C(n, k).

    Chen et al. 2021, Evaluating large language models trained on code, arXiv:2107.03374, eq. 1. The quotient is the
    product of 1 - c / (n - j) for j < k, summed in logs, so that large n costs no digits.

    An invalid attempt counts in neither n nor c. With fewer than k valid attempts pass@k is undefined.

    Args:
        n_valid: integers of any shape, n: completions in B.
        n_correct: the same shape, c: number of right completions among them, 0 ... n.
        k: number of attempts, at least 1.

    Raises:
        ValueError: k is less than 1.
    """
    if k < 1:
        raise ValueError(f"pass@k needs k of at least 1, not {k}")
    known = n_valid >= k
    certain = known & (n_valid - n_correct < k)
    n = torch.where(known & ~certain, n_valid, k).double().unsqueeze(-1)
    c = torch.where(known & ~certain, n_correct, 0).double().unsqueeze(-1)
    j = torch.arange(k, dtype=torch.float64, device=n_valid.device)
    value = torch.log1p(-c / (n - j)).sum(-1).expm1().abs()
    return PassAtK(value=torch.where(certain, 1.0, value), known=known)
