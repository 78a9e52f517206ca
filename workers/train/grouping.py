"""Statistics over the members of a group, found by the group's id: never by position, never in a loop."""

import torch
from torch import Tensor


class Grouping:
    """Sums, means and ties over the valid members of each group.

    Members may be interleaved, groups may be of any size, ids may be any integers. What stands in an invalid place is
    replaced before any arithmetic, so that it cannot matter, be it NaN. All arithmetic is in float64.

    Args:
        group_ids_C: integer ids, one for each member.
        valid_C: bool; members that count.
        groups: number of groups where the ids are codes 0 ... groups - 1 already; a group without members counts 0.
    """

    def __init__(self, group_ids_C: Tensor, valid_C: Tensor, groups: int | None = None) -> None:
        self.valid_C = valid_C
        if groups is None:
            ids_G, self.codes_C = torch.unique(group_ids_C, return_inverse=True)
            groups = len(ids_G)
        else:
            self.codes_C = group_ids_C
        self.groups = groups
        self.count_G = self.sum(torch.ones_like(valid_C, dtype=torch.float64))

    def sum(self, values_C: Tensor) -> Tensor:
        """Sum of each group's valid values, float64."""
        zeros_G = torch.zeros(self.groups, dtype=torch.float64, device=self.codes_C.device)
        return zeros_G.index_add(0, self.codes_C, self._filled(values_C, 0.0))

    def mean(self, values_C: Tensor) -> Tensor:
        """Mean of each group's valid values; 0 where there is none."""
        return self.sum(values_C) / self.count_G.clamp(min=1)

    def tied(self, values_C: Tensor) -> Tensor:
        """True for groups whose valid values are all the same number, a single one and none at all included.

        Compared exactly: the standard deviation of four 0.9s need not come out as 0.
        """
        return self._extreme(values_C, "amin") >= self._extreme(values_C, "amax")

    def spread(self, values_G: Tensor) -> Tensor:
        """Each member's own group's value."""
        return values_G[self.codes_C]

    def _extreme(self, values_C: Tensor, which: str) -> Tensor:
        empty = float("inf") if which == "amin" else float("-inf")
        start_G = torch.full((self.groups,), empty, dtype=torch.float64, device=self.codes_C.device)
        return start_G.scatter_reduce(0, self.codes_C, self._filled(values_C, empty), which)

    def _filled(self, values_C: Tensor, fill: float) -> Tensor:
        return torch.where(self.valid_C, values_C.double(), fill)
