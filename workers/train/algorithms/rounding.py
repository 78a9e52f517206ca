"""What is equal but for rounding is equal, wherever a sign is to be told from a difference.

A difference of 1e-17 has a sign, and that decides at which side a loss is clipped, or where the gradient of a distance
points; on another machine, in another order, it is the other one.
"""

import torch
from torch import Tensor


def tolerant_difference(values: Tensor, baseline: Tensor) -> Tensor:
    """`values - baseline`, exactly 0 where the two are the same but for rounding.

    Args:
        values: of any shape. A mean of many in float64 is off by up to 1e-12 of them; what a model says in float32,
            asked again in another batch, by some units in the last place.
        baseline: broadcast against it.
    """
    tolerance = 1e-12 if values.dtype == torch.float64 else 8 * torch.finfo(values.dtype).eps
    found = values - baseline
    return torch.where(found.detach().abs() <= tolerance * values.detach().abs(), 0.0, found)
