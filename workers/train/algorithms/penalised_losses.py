"""Losses with a penalty on a token's log-ratio instead of a clip."""

import torch
from torch import Tensor

from workers.train.algorithms.loss_registry import LOSSES, LossTraits, TokenLoss
from workers.train.algorithms.ratios import ratio
from workers.train.algorithms.rounding import tolerant_difference


@LOSSES.register(
    "kl_cov",
    LossTraits(selector="kl_cov"),
    formula="-A r, plus coefficient |log r| on selected tokens",
    source="Cui et al. 2025, KL-Cov, arXiv:2505.22617",
)
def kl_cov(
    logprobs_RT: Tensor,
    proximal_RT: Tensor,
    advantages_RT: Tensor,
    selected_RT: Tensor,
    *,
    kl_cov_coefficient: float,
) -> TokenLoss:
    """Compute -A r with a penalty on the selected tokens. Metric `kl/abs`: |log r|.

    The penalty's log-ratio is not clamped, so its gradient is ± the coefficient however far a token has moved.
    """
    distance_RT = tolerant_difference(logprobs_RT, proximal_RT).abs()
    penalty_RT = torch.where(selected_RT, kl_cov_coefficient * distance_RT, 0.0)
    return TokenLoss(-advantages_RT * ratio(logprobs_RT, proximal_RT) + penalty_RT, {"kl/abs": distance_RT})


@LOSSES.register(
    "dro",
    LossTraits(),
    formula="-A lp + beta / 2 (log r)^2",
    source="Richemond et al. 2024, DRO, arXiv:2405.19107; verl core_algos",
)
def dro(logprobs_RT: Tensor, proximal_RT: Tensor, advantages_RT: Tensor, *, dro_beta: float) -> TokenLoss:
    """Compute the plain policy gradient with a squared penalty; no ratio is exponentiated, so none is clamped."""
    penalty_RT = dro_beta / 2 * (logprobs_RT - proximal_RT).square()
    return TokenLoss(-advantages_RT * logprobs_RT + penalty_RT)
