"""Statistics over the tokens of each completion, whichever rows hold them, and ratios of two policies.

Ratios are always computed from log-probs, and always bounded.
"""

from dataclasses import dataclass
from typing import Final

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


LOG_RATIO_BOUND: Final = 20.0
"""Log-ratios are clamped to ± this before exponentiation, so a ratio is at most exp(20), about 5e8."""


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Clamp a log-ratio to ± `LOG_RATIO_BOUND`; the gradient is 0 beyond it."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def ratio(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return exp(logprobs - reference), between exp(-20) and exp(20)."""
    return clamp_log_ratio(logprobs - reference).exp()


@dataclass(frozen=True, slots=True, eq=False)
class LogRatios:
    """Log-ratios of the trainer's policy (pi) to the one that sampled (mu), over the tokens of one mask.

    Rejection, importance weights and their metrics read one such object instead of computing ratios again.
    """

    values_RT: Tensor
    """float64, log pi - log mu without gradient; 0 outside the mask."""
    sequences: Sequences
    """Completions over the same mask."""

    @property
    def mask_RT(self) -> Tensor:
        """bool, tokens that are compared."""
        return self.sequences.mask_RT


def log_ratios(old_logprobs_RT: Tensor, rollout_logprobs_RT: Tensor, sequences: Sequences) -> LogRatios:
    """Compare two policies over the tokens of a mask.

    Args:
        old_logprobs_RT: log-probs under the trainer's policy.
        rollout_logprobs_RT: log-probs under the policy that sampled.
        sequences: completions over the mask. Outside of it, both may hold anything.
    """
    old, rollout = (
        torch.where(sequences.mask_RT, logprobs_RT.detach(), 0.0).double()
        for logprobs_RT in (old_logprobs_RT, rollout_logprobs_RT)
    )
    return LogRatios(old - rollout, sequences)
