"""What a function of a case says, in an order that does not hang on the batch's."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.cases.completions import Made
from tests.cases.path import close


def by_key(case: Sequence[Made], values: Tensor, mask: Tensor) -> Tensor:
    """Values of the mask, completions in the order of their keys; outside of it they must be exactly 0.

    Values and mask have a line to each completion; what a mask of completions says of tokens it says of all of them.
    """
    assert values.shape == mask.shape
    assert (values[~mask] == 0).all(), values
    order = sorted(range(len(case)), key=lambda c: case[c].key)
    return values[order][mask[order]]


def same(left: Tensor, right: Tensor) -> bool:
    """Equal to 1e-12 of the largest."""
    return close(left, right)


def identical(left: Tensor, right: Tensor) -> bool:
    """Equal to the bit."""
    return torch.equal(left, right)
