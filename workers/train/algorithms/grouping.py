"""Statistics over the members of a group, found by the group's id: never by position, never in a loop."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import count

import torch
from torch import Tensor

from workers.train.algorithms.rounding import tolerant_difference


def encode_ids(ids: Sequence[str]) -> tuple[Tensor, list[str]]:
    """Turn names of groups, one for each member, into the codes that a `Grouping` works on; once for a batch.

    Args:
        ids: in any order, members of a group anywhere.

    Returns:
        int64 codes 0 ... groups - 1, in order of first appearance, and the name of each code.

    Example:
        >>> codes_C, names_G = encode_ids(["b", "a", "b"])
        >>> groups = Grouping(codes_C, valid_C, len(names_G))  # codes 0, 1, 0
    """
    codes: defaultdict[str, int] = defaultdict(count().__next__)
    codes_C = torch.tensor(list(map(codes.__getitem__, ids)), dtype=torch.int64)
    return codes_C, list(codes)


class Grouping:
    """Sums, means, spreads and ties over the valid members of each group.

    Members may be interleaved, groups may be of any size, ids may be any integers. What stands in an invalid place is
    replaced before any arithmetic, so that it cannot matter, be it NaN. All arithmetic is in float64 and linear in the
    number of members; with codes nothing is sorted either.

    Args:
        group_ids_C: integer ids, one for each member.
        valid_C: bool; members that count.
        num_groups: number of groups where the ids are codes 0 ... groups - 1 already; a group without members counts 0.
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
        """Sum of each group's valid values, float64; of each column on its own where members have several."""
        return self._sum_by_group(self._masked(values_C, 0.0))

    def mean(self, values_C: Tensor) -> Tensor:
        """Mean of each group's valid values; 0 where there is none."""
        return self.sum(values_C) / self.count_G.clamp(min=1)

    def shift_by_max(self, values_C: Tensor) -> Tensor:
        """Each value less the largest of its group; 0 outside of the valid ones.

        What does not care for a shift is not changed by it, but equal values are exactly 0 from here on (the mean of
        four 0.9s need not be 0.9), and a large offset is gone before it can cost digits.
        """
        largest_C = self.broadcast(torch.where(self.count_G > 0, self.max(values_C), 0.0))
        return torch.where(self.valid_C, values_C.double(), largest_C).sub_(largest_C)

    def centred(self, values_C: Tensor) -> Tensor:
        """Each value less the mean of its group; exactly 0 where all are equal, for a single one, and outside."""
        return self.subtract_mean(self.shift_by_max(values_C))

    def subtract_mean(self, shifted_C: Tensor) -> Tensor:
        """The same of values that are shifted already."""
        mean_G = self._sum_by_group(shifted_C) / self.count_G.clamp(min=1)
        return tolerant_difference(shifted_C, self.broadcast(mean_G)).masked_fill_(~self.valid_C, 0.0)

    def std(self, centred_C: Tensor) -> Tensor:
        """Sample standard deviation (n - 1) of each group, from its centred values; 0 where there are not two."""
        return (self._sum_by_group(centred_C.square()) / (self.count_G - 1).clamp(min=1)).sqrt()

    def tied(self, values_C: Tensor) -> Tensor:
        """True for groups whose valid values are all the same number, a single one and none at all included.

        Compared exactly: the standard deviation of four 0.9s need not come out as 0.
        """
        return self.sum(values_C != self.broadcast(self.max(values_C))) == 0

    def max(self, values_C: Tensor) -> Tensor:
        """Largest of each group's valid values; minus infinity where there is none."""
        lowest = float("-inf")
        start_G = torch.full((self.num_groups,), lowest, dtype=torch.float64, device=self.codes_C.device)
        return start_G.scatter_reduce_(0, self.codes_C, self._masked(values_C, lowest), "amax")

    def second_largest(self, values_C: Tensor) -> Tensor:
        """Second largest, equal to the largest where two are; minus infinity where there are fewer than two."""
        largest_G = self.max(values_C)
        best_C = values_C == self.broadcast(largest_G)
        return torch.where(self.sum(best_C) > 1, largest_G, self.max(torch.where(best_C, float("-inf"), values_C)))

    def broadcast(self, values_G: Tensor) -> Tensor:
        """Each member's own group's value."""
        return values_G.index_select(0, self.codes_C)

    def _masked(self, values_C: Tensor, fill: float) -> Tensor:
        """The values in float64, with `fill` in place of what is invalid."""
        valid_C = self.valid_C.view(len(self.valid_C), *[1] * (values_C.ndim - 1))
        return torch.where(valid_C, values_C.double(), fill)

    def _sum_by_group(self, filled_C: Tensor) -> Tensor:
        """Sums of values in float64 that are 0 in invalid places."""
        return filled_C.new_zeros(self.num_groups, *filled_C.shape[1:]).index_add_(0, self.codes_C, filled_C)
