"""Losses that limit how far a token's ratio moves: PPO's clip, its variants, and SAPO's soft gate."""

import torch
from torch import Tensor

from workers.train.algorithms.registry import LOSSES, LossTraits, TokenLoss
from workers.train.algorithms.sequences import Sequences, clamp_log_ratio, ratio


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
    """Compute PPO's clipped loss; decoupled (arXiv:2110.00641) if proximal and sampling policy differ.

    `LOSSES.inputs` describes the inputs.

    Options:
        clip_low: the ratio is clipped to at least 1 - this.
        clip_high: the ratio is clipped to at most 1 + this.
        dual_clip: where A < 0 the loss is at most -A times this; above 1, or 0 for no bound.
        level: `token`, or `sequence`: the ratio is the geometric mean over the completion's tokens, the advantage is
            their mean, and the gradient passes through the mean.

    Returns:
        The loss. Metrics `clip_fraction`: the clipped term applies; `clip_fraction_lower`: the dual bound applies.

    Raises:
        ValueError: unknown level.
    """
    ratio_RT, advantages = _at_level(level, logprobs_RT, proximal_RT, advantages_RT, sequences)
    loss = clipped_surrogate(ratio_RT, advantages, clip_low, clip_high)
    return _dual_clip(loss, advantages, dual_clip) if dual_clip else loss


@LOSSES.register(
    "dapo",
    LossTraits(),
    formula="max(-A r, -A clip(r, 1 - low, 1 + high)), high > low; defined with token-mean",
    source="Yu et al. 2025, DAPO, arXiv:2503.14476",
)
def dapo(
    logprobs_RT: Tensor, proximal_RT: Tensor, advantages_RT: Tensor, *, clip_low: float, clip_high: float
) -> TokenLoss:
    """Compute the clipped loss with a higher upper bound, so improbable tokens can rise. Metric `clip_fraction`."""
    return clipped_surrogate(ratio(logprobs_RT, proximal_RT), advantages_RT, clip_low, clip_high)


@LOSSES.register(
    "clip_cov",
    LossTraits(selector="clip_cov"),
    formula="max(-A r, -A clip(r, 1 - low, 1 + high)), 0 on selected tokens",
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
    """Compute the clipped loss without the selected tokens, which stay in the denominator.

    Metric `clip_fraction`: selected tokens.
    """
    loss = clipped_surrogate(ratio(logprobs_RT, proximal_RT), advantages_RT, clip_low, clip_high)
    return TokenLoss(torch.where(selected_RT, 0.0, loss.loss_RT), {"clip_fraction": selected_RT})


@LOSSES.register(
    "sapo",
    LossTraits(aggregation="seq-mean-token-mean"),
    formula="-A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A",
    source="Soft Adaptive Policy Optimization, 2025, arXiv:2511.20347; by sequence: AReaL",
)
def sapo(
    logprobs_RT: Tensor,
    proximal_RT: Tensor,
    advantages_RT: Tensor,
    sequences: Sequences,
    *,
    tau_positive: float,
    tau_negative: float,
    level: str,
) -> TokenLoss:
    """Weigh the advantage with a gate that closes smoothly where PPO clips; at r = 1 the gradient is that of -A r.

    Options:
        tau_positive: temperature of the gate where A > 0.
        tau_negative: temperature of the gate elsewhere.
        level: `token` or `sequence`, as for `clipped`.

    Raises:
        ValueError: unknown level.
    """
    ratio_RT, advantages = _at_level(level, logprobs_RT, proximal_RT, advantages_RT, sequences)
    tau_RT = torch.full_like(advantages, tau_negative).masked_fill(advantages > 0, tau_positive)
    gate_RT = torch.sigmoid(tau_RT * (ratio_RT - 1)) * 4 / tau_RT
    return TokenLoss(-advantages * gate_RT)


def clipped_surrogate(ratio_RT: Tensor, advantages_RT: Tensor, clip_low: float, clip_high: float) -> TokenLoss:
    """Return max(-A r, -A clip(r, 1 - low, 1 + high)). Metric `clip_fraction`: the second term applies."""
    plain_RT = -advantages_RT * ratio_RT
    cut_RT = -advantages_RT * ratio_RT.clamp(1 - clip_low, 1 + clip_high)
    return TokenLoss(torch.maximum(plain_RT, cut_RT), {"clip_fraction": cut_RT > plain_RT})


def _at_level(
    level: str, logprobs_RT: Tensor, proximal_RT: Tensor, advantages_RT: Tensor, sequences: Sequences
) -> tuple[Tensor, Tensor]:
    """Return ratios and advantages of each token, or the same for all tokens of a completion.

    By sequence the ratio is the geometric mean over the completion's loss tokens and the advantage is their mean.

    Raises:
        ValueError: unknown level.
    """
    log_ratio = logprobs_RT - proximal_RT
    if level == "token":
        return clamp_log_ratio(log_ratio).exp(), advantages_RT
    if level != "sequence":
        raise ValueError(f"unknown level {level!r}; use 'token' or 'sequence'")
    mean = sequences.broadcast(sequences.mean(log_ratio)).expand_as(logprobs_RT)
    advantages = sequences.broadcast(sequences.mean(advantages_RT)).expand_as(logprobs_RT)
    return clamp_log_ratio(mean).exp(), advantages


def _dual_clip(loss: TokenLoss, advantages_RT: Tensor, dual_clip: float) -> TokenLoss:
    highest_RT = -advantages_RT * dual_clip
    over_RT = (advantages_RT < 0) & (loss.loss_RT > highest_RT)
    loss_RT = torch.where(over_RT, highest_RT, loss.loss_RT)
    return TokenLoss(loss_RT, loss.token_metrics | {"clip_fraction_lower": over_RT})
