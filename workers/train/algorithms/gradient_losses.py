"""Policy-gradient losses: a weight without gradient times a token's log-prob, some with a penalty on its log-ratio."""

import torch
from torch import Tensor

from workers.train.algorithms.grouping import tolerant_difference
from workers.train.algorithms.registry import LOSSES, LossTraits, TokenLoss
from workers.train.algorithms.sequences import ratio


@LOSSES.register(
    "reinforce",
    LossTraits(on_policy=True),
    formula="-A lp",
    source="Williams 1992; with importance weights: verl core_algos.compute_policy_loss_reinforce",
)
def reinforce(logprobs_RT: Tensor, advantages_RT: Tensor) -> TokenLoss:
    """Compute the plain policy gradient; off policy it needs importance weights."""
    return TokenLoss(-advantages_RT * logprobs_RT)


@LOSSES.register(
    "gpg",
    LossTraits(on_policy=True),
    formula="-A lp",
    source="Chu et al. 2025, GPG, arXiv:2504.02546",
)
def gpg(logprobs_RT: Tensor, advantages_RT: Tensor) -> TokenLoss:
    """Compute the plain policy gradient; GPG differs in its advantages."""
    return TokenLoss(-advantages_RT * logprobs_RT)


@LOSSES.register(
    "cispo",
    LossTraits(),
    formula="-sg(clip(r, 1 - low, 1 + high)) A lp",
    source="MiniMax 2025, arXiv:2506.13585, eq. 4",
)
def cispo(
    logprobs_RT: Tensor, proximal_RT: Tensor, advantages_RT: Tensor, *, clip_low: float, clip_high: float
) -> TokenLoss:
    """Clip the ratio as a weight, so every token keeps its gradient. Metric `clip_fraction`: clipped tokens."""
    ratio_RT = ratio(logprobs_RT.detach(), proximal_RT)
    weight_RT = ratio_RT.clamp(1 - clip_low, 1 + clip_high)
    return TokenLoss(-weight_RT * advantages_RT * logprobs_RT, {"clip_fraction": weight_RT != ratio_RT})


@LOSSES.register(
    "dppo_tv",
    LossTraits(),
    formula="-A sg(min(r, cap)) lp [p - p_old <= high if A > 0, else >= -low]",
    source="Rethinking the Trust Region in LLM Reinforcement Learning, 2026, arXiv:2602.04879 (binary TV)",
)
def dppo_tv(
    logprobs_RT: Tensor,
    proximal_RT: Tensor,
    advantages_RT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    ratio_cap: float,
) -> TokenLoss:
    """Mask tokens whose probability has already moved too far in the direction of the advantage.

    `LOSSES.inputs` describes the inputs.

    Options:
        clip_low: largest fall of a probability, 0 to 1.
        clip_high: largest rise of a probability, 0 to 1.
        ratio_cap: upper bound of the ratio.

    Returns:
        The loss. Metrics `clip_fraction`: masked tokens; `clip_fraction_lower`: kept tokens with a capped ratio.
    """
    moved_RT = _probability(logprobs_RT) - _probability(proximal_RT)
    kept_RT = torch.where(advantages_RT > 0, moved_RT <= clip_high, moved_RT >= -clip_low)
    return _masked_policy_gradient(logprobs_RT, proximal_RT, advantages_RT, kept_RT, ratio_cap)


@LOSSES.register(
    "dppo_kl",
    LossTraits(),
    formula="-A sg(min(r, cap)) lp [KL(p_old, p) <= high or p <= p_old if A > 0, else <= low or p >= p_old]",
    source="Rethinking the Trust Region in LLM Reinforcement Learning, 2026, arXiv:2602.04879 (binary KL)",
)
def dppo_kl(
    logprobs_RT: Tensor,
    proximal_RT: Tensor,
    advantages_RT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    ratio_cap: float,
) -> TokenLoss:
    """Mask tokens as `dppo_tv` does, by the KL of the binary distributions "this token or another".

    `LOSSES.inputs` describes the inputs.

    Options:
        clip_low: largest divergence of a token whose probability has fallen, in nats.
        clip_high: largest divergence of a token whose probability has risen, in nats.
        ratio_cap: upper bound of the ratio.

    Returns:
        The loss, with the metrics of `dppo_tv`.
    """
    now_RT, old_RT = _probability(logprobs_RT), _probability(proximal_RT)
    others_RT = ((1 - old_RT + 1e-8) / (1 - now_RT + 1e-8)).log()
    divergence_RT = old_RT * (proximal_RT - logprobs_RT.detach()) + (1 - old_RT) * others_RT
    kept_RT = torch.where(
        advantages_RT > 0,
        (divergence_RT <= clip_high) | (now_RT <= old_RT),
        (divergence_RT <= clip_low) | (now_RT >= old_RT),
    )
    return _masked_policy_gradient(logprobs_RT, proximal_RT, advantages_RT, kept_RT, ratio_cap)


def _masked_policy_gradient(
    logprobs_RT: Tensor, proximal_RT: Tensor, advantages_RT: Tensor, kept_RT: Tensor, ratio_cap: float
) -> TokenLoss:
    ratio_RT = ratio(logprobs_RT.detach(), proximal_RT)
    loss_RT = -advantages_RT * ratio_RT.clamp(max=ratio_cap) * logprobs_RT
    token_metrics = {"clip_fraction": ~kept_RT, "clip_fraction_lower": kept_RT & (ratio_RT > ratio_cap)}
    return TokenLoss(torch.where(kept_RT, loss_RT, 0.0), token_metrics)


def _probability(logprobs_RT: Tensor) -> Tensor:
    # A log-prob above 0 can only be rounding.
    return logprobs_RT.detach().clamp(max=0.0).exp()


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
