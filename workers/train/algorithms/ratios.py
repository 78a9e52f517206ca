"""Ratios of two policies: always computed from log-probs, always bounded."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from workers.train.algorithms.sequences import Sequences

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
