"""Statistics over the members of each group, found by group id: never by position, never in a loop.

A difference that is only rounding noise becomes exactly 0. A difference of 1e-17 still has a sign, and that sign may
decide on which side a loss is clipped or where the gradient of a distance points; on another machine, in another order,
it is the opposite one.
"""

import torch
from torch import Tensor


class Grouping:
    """Sums, means, standard deviations and ties over the valid members of each group.

    Members may be interleaved, groups may have any size, ids may be any integers. Values of invalid members are
    replaced before any arithmetic, so they may be NaN. All arithmetic is in float64 and linear in the number of
    members; with codes nothing is sorted either.

    Args:
        group_ids_C: integer ids, one per member.
        valid_C: bool, members that count.
        num_groups: number of groups if the ids are codes 0 ... num_groups - 1 already; groups may be empty.
    """

    def __init__(self, group_ids_C: Tensor, valid_C: Tensor, num_groups: int | None = None) -> None:
        self.valid_C = valid_C
        if num_groups is None:
            ids_G, self.codes_C = torch.unique(group_ids_C, return_inverse=True)
            num_groups = len(ids_G)
        else:
            self.codes_C = group_ids_C
        self.num_groups = num_groups
        self.count_G = self._sum_by_group(valid_C.double())
        """float64, valid members of each group."""

    def sum(self, values_C: Tensor) -> Tensor:
        """Return the sum of each group's valid values, float64; per column if members have several."""
        return self._sum_by_group(self._masked(values_C, 0.0))

    def mean(self, values_C: Tensor) -> Tensor:
        """Return the mean of each group's valid values, 0 for a group without any."""
        return self.sum(values_C) / self.count_G.clamp(min=1)

    def shift_by_max(self, values_C: Tensor) -> Tensor:
        """Return each value minus the maximum of its group; 0 for invalid members.

        Shift-invariant results stay the same, equal values become exactly 0 (the mean of four 0.9s may differ from
        0.9), and a large offset is removed before it costs digits.
        """
        max_C = self.broadcast(torch.where(self.count_G > 0, self.max(values_C), 0.0))
        return torch.where(self.valid_C, values_C.double(), max_C).sub_(max_C)

    def centred(self, values_C: Tensor) -> Tensor:
        """Return each value minus its group's mean; exactly 0 if all are equal, for one member, and if invalid."""
        return self.subtract_mean(self.shift_by_max(values_C))

    def subtract_mean(self, shifted_C: Tensor) -> Tensor:
        """Return `centred` of values that `shift_by_max` has already shifted."""
        mean_G = self._sum_by_group(shifted_C) / self.count_G.clamp(min=1)
        return tolerant_difference(shifted_C, self.broadcast(mean_G)).masked_fill_(~self.valid_C, 0.0)

    def std(self, centred_C: Tensor) -> Tensor:
        """Return each group's sample standard deviation (n - 1) from centred values; 0 for fewer than two members."""
        return (self._sum_by_group(centred_C.square()) / (self.count_G - 1).clamp(min=1)).sqrt()

    def tied(self, values_C: Tensor) -> Tensor:
        """Return True for groups whose valid values are all equal, including groups with one or none.

        The comparison is exact: the standard deviation of four 0.9s may not come out as 0.
        """
        return self.sum(values_C != self.broadcast(self.max(values_C))) == 0

    def max(self, values_C: Tensor) -> Tensor:
        """Return the maximum of each group's valid values, minus infinity for a group without any."""
        lowest = float("-inf")
        start_G = torch.full((self.num_groups,), lowest, dtype=torch.float64, device=self.codes_C.device)
        return start_G.scatter_reduce_(0, self.codes_C, self._masked(values_C, lowest), "amax")

    def second_largest(self, values_C: Tensor) -> Tensor:
        """Return each group's second largest value, which equals a tied maximum; minus infinity below two members."""
        max_G = self.max(values_C)
        best_C = values_C == self.broadcast(max_G)
        return torch.where(self.sum(best_C) > 1, max_G, self.max(torch.where(best_C, float("-inf"), values_C)))

    def broadcast(self, values_G: Tensor) -> Tensor:
        """Return each member's group value."""
        return values_G.index_select(0, self.codes_C)

    def _masked(self, values_C: Tensor, fill: float) -> Tensor:
        """Return the values in float64, with `fill` for invalid members."""
        valid_C = self.valid_C.view(len(self.valid_C), *[1] * (values_C.ndim - 1))
        return torch.where(valid_C, values_C.double(), fill)

    def _sum_by_group(self, masked_C: Tensor) -> Tensor:
        """Sum float64 values that are already 0 for invalid members."""
        return masked_C.new_zeros(self.num_groups, *masked_C.shape[1:]).index_add_(0, self.codes_C, masked_C)


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
