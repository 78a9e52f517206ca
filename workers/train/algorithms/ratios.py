"""Ratios of two policies: always from log-probs, and always bounded."""

from typing import Final

from torch import Tensor

LOG_RATIO_BOUND: Final = 20.0
"""Log-ratios are clamped to ± this before they are exponentiated, so that a ratio is at most exp(20), about 5e8."""


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Clamp a log-ratio to ± `LOG_RATIO_BOUND`; beyond it there is no gradient."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def ratio(logprobs: Tensor, reference: Tensor) -> Tensor:
    """exp(logprobs - reference), between exp(-20) and exp(20)."""
    return clamp_log_ratio(logprobs - reference).exp()
