"""Losses with one ratio to a completion, the geometric mean of its tokens', over all rows that it has."""

from typing import Final

import torch
from torch import Tensor

from workers.train.algorithms.clipped_losses import clipped_surrogate
from workers.train.algorithms.loss_registry import LOSSES, LossTraits, TokenLoss
from workers.train.algorithms.ratios import LOG_RATIO_BOUND, clamp_log_ratio
from workers.train.algorithms.sequences import Sequences

SEQUENCE_LOG_RATIO_BOUND: Final = 10.0
"""Upper bound of GSPO's log-ratio, as in verl."""
LEAST_WEIGHT: Final = 1e-10
"""Importance weights are at least this before a geometric mean is taken of them."""


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
    """The clipped loss with the completion's ratio; each token has its own gradient and may have its own advantage.

    What it needs is described in `LOSSES.inputs`.

    Options:
        clip_low: the ratio is clipped to at least 1 - this.
        clip_high: and to at most 1 + this. Both are far smaller than PPO's: a mean moves less than its parts.

    Returns:
        The loss. Mark `clip_fraction`: the clipped term was taken.
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
    """The geometric mean of the clipped token ratios, times the completion's mean advantage, on each of its tokens.

    With `seq-mean-token-mean` that is the mean over completions. Importance weights enter as their geometric mean.

    What it needs is described in `LOSSES.inputs`.

    Options:
        clip_low: a log-ratio is clipped at minus this where the advantage is negative.
        clip_high: and at this where it is positive.

    Returns:
        The loss. Marks: tokens whose log-ratio is out of the bounds, `clip_fraction` where the advantage is positive,
        `clip_fraction_lower` where it is negative.
    """
    sign_RT = advantages_RT.sign()
    log_ratio_RT = clamp_log_ratio(logprobs_RT - proximal_RT)
    cut_RT = log_ratio_RT.clamp(-clip_low, clip_high)
    taken_RT = sign_RT * torch.minimum(sign_RT * log_ratio_RT, sign_RT * cut_RT)
    weight_S = sequences.mean(weights_RT.clamp(min=LEAST_WEIGHT).log()).exp()
    loss_S = -sequences.mean(advantages_RT) * sequences.mean(taken_RT).exp() * weight_S
    out_RT = log_ratio_RT != cut_RT
    marks = {"clip_fraction": out_RT & (sign_RT > 0), "clip_fraction_lower": out_RT & (sign_RT < 0)}
    return TokenLoss(sequences.broadcast(loss_S).expand_as(logprobs_RT), marks)
