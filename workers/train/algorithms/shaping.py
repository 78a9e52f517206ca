"""Reward shaping: what is done to a measured reward before it is compared.

Every function looks at finiteness first: what is outside of B (never measured, not finite, excluded) stays out, as 0.0,
and is neither biased nor clipped into a number. A reward in B is finite by the meaning of B; one that is not, or that
does not stay so, is an error and never a number.
"""

import torch
from torch import Tensor

from workers.train.algorithms.registry import Registry

REWARD_SHAPINGS: Registry[None] = Registry(
    "shaping",
    {
        "rewards_C": "float64, anything outside of B",
        "baseline_C": "bool, B",
        "lengths_C": "int64, sampled tokens",
        "penalised_C": "bool, truncated under the policy `penalty`",
    },
)
"""By name. Each returns float64 (C), the shaped rewards: 0.0 outside of B."""


@REWARD_SHAPINGS.register("biased_scaled", None, formula="(r + bias) scale", source="AReaL actor.py")
def shift_and_scale(rewards_C: Tensor, baseline_C: Tensor, *, bias: float, scale: float) -> Tensor:
    """Shift, then stretch.

    Raises:
        ValueError: a reward of B is not finite, or is not any more.
    """
    return _finite_in_baseline((_finite_in_baseline(rewards_C, baseline_C) + bias) * scale, baseline_C)


@REWARD_SHAPINGS.register("clipped", None, formula="min(max(r, -limit), limit)", source="AReaL actor.py")
def clip_rewards(rewards_C: Tensor, baseline_C: Tensor, *, limit: float) -> Tensor:
    """Bring rewards within ± `limit`; infinity is none.

    Raises:
        ValueError: a reward of B is not finite: it is invalid, and must not become the limit.
    """
    return _finite_in_baseline(rewards_C, baseline_C).clamp(-limit, limit)


@REWARD_SHAPINGS.register(
    "overlong",
    None,
    formula="r + min(-(len - (max - tail)) / tail factor, 0), at least -factor off where cut short",
    source="Yu et al. 2025, DAPO, arXiv:2503.14476, eq. 13; AReaL functional.py",
)
def shape_overlong(
    rewards_C: Tensor,
    baseline_C: Tensor,
    lengths_C: Tensor,
    penalised_C: Tensor,
    *,
    max_length: int,
    tail: int,
    factor: float,
) -> Tensor:
    """Rewards with `overlong_penalty` added.

    Raises:
        ValueError: a reward of B is not finite; the tail is no length.
    """
    penalty_C = overlong_penalty(lengths_C, penalised_C, max_length=max_length, tail=tail, factor=factor)
    return _finite_in_baseline(_finite_in_baseline(rewards_C, baseline_C) + penalty_C, baseline_C)


def overlong_penalty(lengths_C: Tensor, penalised_C: Tensor, *, max_length: int, tail: int, factor: float) -> Tensor:
    """What is added to a reward for length: 0 up to `max_length - tail` tokens, then falling to -`factor` at the most.

    Beyond `max_length` it falls on. A completion that was cut short under the policy `penalty` pays the whole `factor`
    at least, however long it is: its limit may have been another (turns, context).

    Args:
        lengths_C: int64, sampled tokens.
        penalised_C: bool, truncated under the policy `penalty`.
        max_length: tokens.
        tail: the last tokens before it, over which the penalty grows; 1 or more.
        factor: the whole penalty, 0 or more.

    Returns:
        float64, 0 or less.

    Raises:
        ValueError: the tail is no length.
    """
    if tail < 1:
        raise ValueError(f"the overlong tail is {tail} tokens; it must be 1 or more")
    excess_C = lengths_C.double() - (max_length - tail)
    penalty_C = (-excess_C / tail * factor).clamp(max=0)
    return torch.where(penalised_C, penalty_C.clamp(max=-factor), penalty_C)


def _finite_in_baseline(rewards_C: Tensor, baseline_C: Tensor) -> Tensor:
    """Rewards of B, which must be finite; 0.0 elsewhere."""
    rewards_C = torch.where(baseline_C, rewards_C.double(), 0.0)
    if not bool(torch.isfinite(rewards_C).all()):
        raise ValueError("a reward in the baseline mask is not finite; it is invalid and must be left out of the mask")
    return rewards_C
