"""Statistics over the tokens of a completion, whichever rows they stand in."""

import torch
from torch import Tensor


class Sequences:
    """Sums and means over the loss tokens of each completion; gradients pass through.

    A completion may have several rows (a chat template that rewrites history); each sampled token bears loss in exactly
    one of them. All rows of a completion must be here: a micro-batch never tears a completion apart.

    Args:
        mask_RT: bool, the tokens that count.
        completion_ids_R: integers, the completion that each row belongs to.
    """

    def __init__(self, mask_RT: Tensor, completion_ids_R: Tensor) -> None:
        self.mask_RT = mask_RT
        _, self.codes_R = torch.unique(completion_ids_R, return_inverse=True)
        self.number = int(self.codes_R.max()) + 1 if len(self.codes_R) else 0
        """Completions that have a row here, S."""
        self.length_S = self._gather(mask_RT.sum(dim=1))
        """int64, loss tokens of each completion."""

    def sum(self, values_RT: Tensor) -> Tensor:
        """Sum over each completion's loss tokens; 0 where there is none. What stands elsewhere may be anything."""
        return self._gather(torch.where(self.mask_RT, values_RT, 0.0).sum(dim=1))

    def mean(self, values_RT: Tensor) -> Tensor:
        """Mean over each completion's loss tokens; 0 where there is none."""
        return self.sum(values_RT) / self.length_S.clamp(min=1)

    def largest(self, values_RT: Tensor) -> Tensor:
        """Largest of each completion's loss tokens; minus infinity where there is none."""
        lowest = float("-inf")
        if not values_RT.shape[1]:
            return values_RT.new_full((self.number,), lowest)
        largest_R = torch.where(self.mask_RT, values_RT, lowest).amax(dim=1)
        return values_RT.new_full((self.number,), lowest).scatter_reduce(0, self.codes_R, largest_R, "amax")

    def spread(self, values_S: Tensor) -> Tensor:
        """Each row's own completion's value, shape (R, 1): it broadcasts over the row's tokens."""
        return values_S[self.codes_R].unsqueeze(1)

    def _gather(self, values_R: Tensor) -> Tensor:
        return values_R.new_zeros(self.number).index_add(0, self.codes_R, values_R)
