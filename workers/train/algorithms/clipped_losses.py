"""Losses that stop a token whose ratio has moved far enough: PPO's clip, its relatives, and a soft gate instead."""

import torch
from torch import Tensor

from workers.train.algorithms.loss_registry import LOSSES, LossTraits, TokenLoss
from workers.train.algorithms.ratios import clamp_log_ratio, ratio
from workers.train.algorithms.sequences import Sequences


@LOSSES.register(
    "clipped",
    LossTraits(),
    formula="max(-A r, -A clip(r, 1 - low, 1 + high)); with dual clip c: where A < 0 at most -A c",
    source="Schulman et al. 2017, arXiv:1707.06347; dual clip: Ye et al. 2020, arXiv:1912.09729; by sequence: AReaL",
)
def clipped(
    logprobs_RT: Tensor,
    proximal_RT: Tensor,
    advantages_RT: Tensor,
    sequences: Sequences,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
    level: str,
) -> TokenLoss:
    """PPO's clipped loss; decoupled (Hilton et al. 2021, arXiv:2110.00641) where proximal and behaviour policy differ.

    What it needs is described in `LOSSES.inputs`.

    Options:
        clip_low: the ratio is clipped to at least 1 - this.
        clip_high: and to at most 1 + this.
        dual_clip: where the advantage is negative, the loss is at most this often -A; above 1, or 0 for no such bound.
        level: `token`, or `sequence`: the ratio is the geometric mean over the completion's tokens, the advantage
            their mean, and the gradient goes through the mean.

    Returns:
        The loss. Marks `clip_fraction`: the clipped term was taken; `clip_fraction_lower`: the dual bound was.

    Raises:
        ValueError: a level that does not exist.
    """
    if level == "token":
        log_ratio, advantages = logprobs_RT - proximal_RT, advantages_RT
    elif level == "sequence":
        log_ratio = sequences.broadcast(sequences.mean(logprobs_RT - proximal_RT)).expand_as(logprobs_RT)
        advantages = sequences.broadcast(sequences.mean(advantages_RT)).expand_as(logprobs_RT)
    else:
        raise ValueError(f"there is no level {level!r}; use 'token' or 'sequence'")
    found = clipped_surrogate(clamp_log_ratio(log_ratio).exp(), advantages, clip_low, clip_high)
    return _dual_clip(found, advantages, dual_clip) if dual_clip else found


@LOSSES.register(
    "dapo",
    LossTraits(),
    formula="max(-A r, -A clip(r, 1 - low, 1 + high)), high > low; defined with token-mean",
    source="Yu et al. 2025, DAPO, arXiv:2503.14476",
)
def dapo(
    logprobs_RT: Tensor, proximal_RT: Tensor, advantages_RT: Tensor, *, clip_low: float, clip_high: float
) -> TokenLoss:
    """The clipped loss with more room upwards, so that improbable tokens can rise. Mark `clip_fraction`."""
    return clipped_surrogate(ratio(logprobs_RT, proximal_RT), advantages_RT, clip_low, clip_high)


@LOSSES.register(
    "clip_cov",
    LossTraits(selector="clip_cov"),
    formula="max(-A r, -A clip(r, 1 - low, 1 + high)), 0 on chosen tokens",
    source="Cui et al. 2025, Clip-Cov, arXiv:2505.22617",
)
def clip_cov(
    logprobs_RT: Tensor,
    proximal_RT: Tensor,
    advantages_RT: Tensor,
    selected_RT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """The clipped loss without the tokens that its selector chose; they stay in the denominator.

    Mark `clip_fraction`: tokens that were chosen.
    """
    found = clipped_surrogate(ratio(logprobs_RT, proximal_RT), advantages_RT, clip_low, clip_high)
    return TokenLoss(torch.where(selected_RT, 0.0, found.loss_RT), {"clip_fraction": selected_RT})


@LOSSES.register(
    "sapo",
    LossTraits(aggregation="seq-mean-token-mean"),
    formula="-A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A",
    source="Soft Adaptive Policy Optimization, 2025, arXiv:2511.20347",
)
def sapo(
    logprobs_RT: Tensor, proximal_RT: Tensor, advantages_RT: Tensor, *, tau_positive: float, tau_negative: float
) -> TokenLoss:
    """A gate that closes smoothly where the clip would cut; at r = 1 its gradient is that of -A r."""
    tau_RT = torch.full_like(advantages_RT, tau_negative).masked_fill(advantages_RT > 0, tau_positive)
    gate_RT = torch.sigmoid(tau_RT * (ratio(logprobs_RT, proximal_RT) - 1)) * 4 / tau_RT
    return TokenLoss(-advantages_RT * gate_RT)


def clipped_surrogate(ratio_RT: Tensor, advantages_RT: Tensor, clip_low: float, clip_high: float) -> TokenLoss:
    """PPO's max(-A r, -A clip(r, 1 - low, 1 + high)) of any ratio. Mark `clip_fraction`: the second one was taken."""
    plain_RT = -advantages_RT * ratio_RT
    cut_RT = -advantages_RT * ratio_RT.clamp(1 - clip_low, 1 + clip_high)
    return TokenLoss(torch.maximum(plain_RT, cut_RT), {"clip_fraction": cut_RT > plain_RT})


def _dual_clip(found: TokenLoss, advantages_RT: Tensor, dual_clip: float) -> TokenLoss:
    highest_RT = -advantages_RT * dual_clip
    over_RT = (advantages_RT < 0) & (found.loss_RT > highest_RT)
    loss_RT = torch.where(over_RT, highest_RT, found.loss_RT)
    return TokenLoss(loss_RT, found.token_metrics | {"clip_fraction_lower": over_RT})
