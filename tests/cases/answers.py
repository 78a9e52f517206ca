"""Compare results of a function on a case, in an order that does not depend on the batch's."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.cases.completions import Made
from tests.cases.path import close


def by_key(case: Sequence[Made], values: Tensor, mask: Tensor) -> Tensor:
    """Return the values inside the mask, ordered by the completions' keys; values outside must be exactly 0.

    Values and mask have one row per completion. A mask over completions applies to all tokens of each completion.
    """
    assert values.shape == mask.shape
    assert (values[~mask] == 0).all(), values
    order = sorted(range(len(case)), key=lambda c: case[c].key)
    return values[order][mask[order]]


def same(left: Tensor, right: Tensor) -> bool:
    """Whether both are equal up to 1e-12 of the largest value."""
    return close(left, right)


def identical(left: Tensor, right: Tensor) -> bool:
    """Whether both are equal bit by bit."""
    return torch.equal(left, right)
