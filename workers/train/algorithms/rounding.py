"""Differences that are exactly 0 if they are only rounding noise.

A difference of 1e-17 still has a sign, and that sign may decide on which side a loss is clipped or where the gradient
of a distance points; on another machine, in another order, it is the opposite one.
"""

import torch
from torch import Tensor


def tolerant_difference(values: Tensor, baseline: Tensor) -> Tensor:
    """Return `values - baseline`, exactly 0 where the two differ by rounding only.

    Args:
        values: of any shape. A mean of many values in float64 is off by up to 1e-12 of them; a model's float32 output
            for the same tokens in another batch, by some units in the last place.
        baseline: broadcast against `values`.
    """
    tolerance = 1e-12 if values.dtype == torch.float64 else 8 * torch.finfo(values.dtype).eps
    difference = values - baseline
    return torch.where(difference.detach().abs() <= tolerance * values.detach().abs(), 0.0, difference)
