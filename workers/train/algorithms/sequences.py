"""Statistics over the tokens of each completion, whichever rows hold them."""

import torch
from torch import Tensor


class Sequences:
    """Sums, means and maxima over the masked tokens of each completion; gradients pass through.

    A completion may have several rows (its chat template rewrites history); each sampled token bears loss in exactly
    one of them. All rows of a completion must be present, so a micro-batch never splits a completion.

    Args:
        mask_RT: bool, tokens that count.
        completion_ids_R: integer id of each row's completion.
    """

    def __init__(self, mask_RT: Tensor, completion_ids_R: Tensor) -> None:
        self.mask_RT = mask_RT
        _, self.codes_R = torch.unique(completion_ids_R, return_inverse=True)
        self.num_sequences = int(self.codes_R.max()) + 1 if len(self.codes_R) else 0
        """Number of completions with at least one row, S."""
        self.lengths_S = self._sum_rows(mask_RT.sum(dim=1))
        """int64, masked tokens of each completion."""

    @property
    def lengths_R(self) -> Tensor:
        """int64, masked tokens of each row's completion, over all its rows."""
        return self.lengths_S[self.codes_R]

    def sum(self, values_RT: Tensor) -> Tensor:
        """Return the sum over each completion's masked tokens, 0 if it has none; other positions may hold anything."""
        return self._sum_rows(torch.where(self.mask_RT, values_RT, 0.0).sum(dim=1))

    def mean(self, values_RT: Tensor) -> Tensor:
        """Return the mean over each completion's masked tokens, 0 if it has none."""
        return self.sum(values_RT) / self.lengths_S.clamp(min=1)

    def max(self, values_RT: Tensor) -> Tensor:
        """Return the maximum over each completion's masked tokens, minus infinity if it has none."""
        lowest = float("-inf")
        if not values_RT.shape[1]:
            return values_RT.new_full((self.num_sequences,), lowest)
        max_R = torch.where(self.mask_RT, values_RT, lowest).amax(dim=1)
        return values_RT.new_full((self.num_sequences,), lowest).scatter_reduce(0, self.codes_R, max_R, "amax")

    def broadcast(self, values_S: Tensor) -> Tensor:
        """Return each row's completion value with shape (R, 1), which broadcasts over the row's tokens."""
        return values_S[self.codes_R].unsqueeze(1)

    def _sum_rows(self, values_R: Tensor) -> Tensor:
        return values_R.new_zeros(self.num_sequences).index_add(0, self.codes_R, values_R)
