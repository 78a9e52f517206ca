"""Losses with one ratio per completion: the geometric mean over its tokens, in all of its rows."""

from typing import Final

import torch
from torch import Tensor

from workers.train.algorithms.clipped_losses import clipped_surrogate
from workers.train.algorithms.registry import LOSSES, LossTraits, TokenLoss
from workers.train.algorithms.sequences import LOG_RATIO_BOUND, Sequences, clamp_log_ratio

SEQUENCE_LOG_RATIO_BOUND: Final = 10.0
"""Upper bound of GSPO's log-ratio, as in verl."""
MIN_WEIGHT: Final = 1e-10
"""Lower bound of importance weights inside a geometric mean."""


@LOSSES.register(
    "gspo",
    LossTraits(aggregation="seq-mean-token-mean"),
    formula="max(-A s, -A clip(s, 1 - low, 1 + high)), s = exp(lp - sg(lp) + sg(mean_t log r))",
    source="Zheng et al. 2025, GSPO, arXiv:2507.18071 (GSPO-token)",
)
def gspo(
    logprobs_RT: Tensor,
    proximal_RT: Tensor,
    advantages_RT: Tensor,
    sequences: Sequences,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """Compute the clipped loss with the completion's ratio; tokens keep their own gradients and advantages.

    `LOSSES.inputs` describes the inputs.

    Options:
        clip_low: the ratio is clipped to at least 1 - this.
        clip_high: the ratio is clipped to at most 1 + this. Both bounds are far smaller than PPO's, because a mean
            moves less than its parts.

    Returns:
        The loss. Metric `clip_fraction`: the clipped term applies.
    """
    mean_R1 = sequences.broadcast(sequences.mean(logprobs_RT - proximal_RT)).detach()
    log_ratio_RT = logprobs_RT - logprobs_RT.detach() + mean_R1
    ratio_RT = log_ratio_RT.clamp(-LOG_RATIO_BOUND, SEQUENCE_LOG_RATIO_BOUND).exp()
    return clipped_surrogate(ratio_RT, advantages_RT, clip_low, clip_high)


@LOSSES.register(
    "geo_mean",
    LossTraits(aggregation="seq-mean-token-mean"),
    formula="-mean_t(A) exp(mean_t log r'), log r' = log r clipped to (-low, high) where A gains by it",
    source="Zhao et al. 2025, GMPO, arXiv:2507.20673",
)
def geo_mean(
    logprobs_RT: Tensor,
    proximal_RT: Tensor,
    advantages_RT: Tensor,
    weights_RT: Tensor,
    sequences: Sequences,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """Multiply the geometric mean of the clipped token ratios by the completion's mean advantage.

    Every token of the completion gets the product, so `seq-mean-token-mean` is the mean over completions. Importance
    weights enter as their geometric mean.

    `LOSSES.inputs` describes the inputs.

    Options:
        clip_low: a log-ratio is clipped at minus this where the advantage is negative.
        clip_high: a log-ratio is clipped at this where the advantage is positive.

    Returns:
        The loss. Metrics: tokens whose log-ratio is out of bounds, `clip_fraction` where the advantage is positive,
        `clip_fraction_lower` where it is negative.
    """
    sign_RT = advantages_RT.sign()
    log_ratio_RT = clamp_log_ratio(logprobs_RT - proximal_RT)
    clipped_RT = log_ratio_RT.clamp(-clip_low, clip_high)
    bounded_RT = sign_RT * torch.minimum(sign_RT * log_ratio_RT, sign_RT * clipped_RT)
    weight_S = sequences.mean(weights_RT.clamp(min=MIN_WEIGHT).log()).exp()
    loss_S = -sequences.mean(advantages_RT) * sequences.mean(bounded_RT).exp() * weight_S
    outside_RT = log_ratio_RT != clipped_RT
    token_metrics = {"clip_fraction": outside_RT & (sign_RT > 0), "clip_fraction_lower": outside_RT & (sign_RT < 0)}
    return TokenLoss(sequences.broadcast(loss_S).expand_as(logprobs_RT), token_metrics)
