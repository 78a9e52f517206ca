"""Policy losses over the sampled tokens of a batch, or of a part of it.

Three policies meet here: the one that sampled (behaviour), the trainer's when the batch was formed (proximal), and the
trainer's now. A loss is a sum over its part's tokens divided by the loss tokens of the *whole* optimizer batch, so that
any partition into micro-batches adds up to the same loss and gradient.

What stands in a masked place is replaced before any arithmetic: a `where` after it would leave the loss finite and make
the gradient NaN.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

LOG_RATIO_BOUND: Final = 20.0
"""Log-ratios are clamped to ± this before they are exponentiated."""


@dataclass(frozen=True, slots=True, eq=False)
class LossOutput:
    """A part's share of the loss, and sums from which metrics are made."""

    loss: Tensor
    """Scalar; the shares of all parts add up to the batch's loss."""
    sums: dict[str, Tensor]
    """Detached scalars that add up over parts; divided by the denominator they are means over loss tokens."""
    maxima: dict[str, Tensor]
    """Detached scalars of which the largest over parts counts."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A registered loss."""

    name: str
    function: Callable[..., LossOutput]
    formula: str
    source: str
    options: tuple[str, ...]
    """Names of its keyword-only parameters, the denominator left out."""


LOSSES: Final[dict[str, Loss]] = {}
"""By name, as `[algorithm] loss` says it."""


def loss(name: str, *, formula: str, source: str) -> Callable[[Callable[..., LossOutput]], Callable[..., LossOutput]]:
    """Register a loss under a name."""

    def register(function: Callable[..., LossOutput]) -> Callable[..., LossOutput]:
        if name in LOSSES:
            raise ValueError(f"a loss named {name!r} is registered already")
        parameters = inspect.signature(function).parameters.values()
        options = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "denominator")
        LOSSES[name] = Loss(name=name, function=function, formula=formula, source=source, options=options)
        return function

    return register


@loss(
    "clipped",
    formula="min(prox/mu, cap) max(-A r, -A clip(r, 1 - low, 1 + high)), r = pi/prox",
    source="Schulman et al. 2017, arXiv:1707.06347; decoupled: Hilton et al. 2021, arXiv:2110.00641",
)
def clipped(
    logprobs_RT: Tensor,
    proximal_RT: Tensor,
    behaviour_RT: Tensor,
    advantages_R: Tensor,
    token_mask_RT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    behaviour_cap: float,
    denominator: float,
) -> LossOutput:
    """PPO's clipped loss around the proximal policy, times the truncated weight proximal / behaviour.

    Args:
        logprobs_RT: the trainer's log-probs now, with gradient.
        proximal_RT: the trainer's when the batch was formed. Equal to `behaviour_RT` where the engine's are taken.
        behaviour_RT: the engine's, of the distribution that was really sampled.
        advantages_R: one for each row.
        token_mask_RT: bool, tokens that bear loss. Everything else may hold anything.
        clip_low: r is clipped to at least 1 - this.
        clip_high: and to at most 1 + this.
        behaviour_cap: upper bound of the weight, which bears no gradient.
        denominator: loss tokens of the whole optimizer batch.
    """
    logprobs = torch.where(token_mask_RT, logprobs_RT, 0.0)
    proximal = torch.where(token_mask_RT, proximal_RT, 0.0).detach()
    behaviour = torch.where(token_mask_RT, behaviour_RT, 0.0).detach()
    advantages = torch.where(token_mask_RT, advantages_R.unsqueeze(1), 0.0).detach()

    ratio = _exp(logprobs - proximal)
    weight_all = _exp(proximal - behaviour)
    weight = weight_all.clamp(max=behaviour_cap)
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    per_token = torch.where(token_mask_RT, torch.maximum(plain, bounded) * weight, 0.0)
    total = per_token.sum() / denominator

    with torch.no_grad():
        sums = {
            "clip_fraction": (bounded > plain).sum(),
            "ratio/mean": _masked_sum(ratio, token_mask_RT),
            "weight/mean": _masked_sum(weight, token_mask_RT),
            "weight/capped_fraction": (token_mask_RT & (weight_all > behaviour_cap)).sum(),
            "kl/k1": (behaviour - proximal).sum(),
            "kl/k3": (weight_all - 1 - (proximal - behaviour)).sum(),
        }
        maxima = {
            "ratio/max": torch.where(token_mask_RT, ratio, 0.0).max() if ratio.numel() else ratio.new_zeros(()),
            "weight/max": torch.where(token_mask_RT, weight, 0.0).max() if weight.numel() else weight.new_zeros(()),
        }
    return LossOutput(loss=total, sums=sums, maxima=maxima)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def _masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum()
