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
        self.num_sequences = int(self.codes_R.max()) + 1 if len(self.codes_R) else 0
        """Completions that have a row here, S."""
        self.lengths_S = self._sum_rows(mask_RT.sum(dim=1))
        """int64, loss tokens of each completion."""

    def sum(self, values_RT: Tensor) -> Tensor:
        """Sum over each completion's loss tokens; 0 where there is none. What stands elsewhere may be anything."""
        return self._sum_rows(torch.where(self.mask_RT, values_RT, 0.0).sum(dim=1))

    def mean(self, values_RT: Tensor) -> Tensor:
        """Mean over each completion's loss tokens; 0 where there is none."""
        return self.sum(values_RT) / self.lengths_S.clamp(min=1)

    def max(self, values_RT: Tensor) -> Tensor:
        """Largest of each completion's loss tokens; minus infinity where there is none."""
        lowest = float("-inf")
        if not values_RT.shape[1]:
            return values_RT.new_full((self.num_sequences,), lowest)
        largest_R = torch.where(self.mask_RT, values_RT, lowest).amax(dim=1)
        return values_RT.new_full((self.num_sequences,), lowest).scatter_reduce(0, self.codes_R, largest_R, "amax")

    def broadcast(self, values_S: Tensor) -> Tensor:
        """Each row's own completion's value, shape (R, 1): it broadcasts over the row's tokens."""
        return values_S[self.codes_R].unsqueeze(1)

    def _sum_rows(self, values_R: Tensor) -> Tensor:
        return values_R.new_zeros(self.num_sequences).index_add(0, self.codes_R, values_R)
