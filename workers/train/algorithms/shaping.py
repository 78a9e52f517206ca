"""Reward shaping: changes to measured rewards before they are compared.

Rewards outside B (never measured, not finite, excluded) stay 0.0 and are not clipped into a number. A
reward in B is finite by definition of B; one that is not, before or after shaping, is an error.
"""

import torch
from torch import Tensor

from workers.train.algorithms.registry import Registry

REWARD_SHAPINGS: Registry[None] = Registry(
    "shaping",
    {
        "rewards_C": "float64, anything outside B",
        "baseline_C": "bool, B",
        "lengths_C": "int64, sampled tokens",
        "penalised_C": "bool, truncated under the policy `penalty`",
    },
)
"""Shapings by name. Each returns float64 (C), the shaped rewards: 0.0 outside B."""


@REWARD_SHAPINGS.register("clipped", None, formula="min(max(r, -limit), limit)", source="AReaL actor.py")
def clip_rewards(rewards_C: Tensor, baseline_C: Tensor, *, limit: float) -> Tensor:
    """Clip rewards to ± `limit`; infinity for no limit.

    Raises:
        ValueError: a reward in B is not finite; clipping would turn an invalid reward into the limit.
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
    """Add `overlong_penalty` to the rewards.

    Raises:
        ValueError: a reward in B is not finite, or `tail` is less than 1.
    """
    penalty_C = overlong_penalty(lengths_C, penalised_C, max_length=max_length, tail=tail, factor=factor)
    return _finite_in_baseline(_finite_in_baseline(rewards_C, baseline_C) + penalty_C, baseline_C)


def overlong_penalty(lengths_C: Tensor, penalised_C: Tensor, *, max_length: int, tail: int, factor: float) -> Tensor:
    """Return the soft overlong penalty: 0 up to `max_length - tail` tokens, then falling linearly to -`factor`.

    It keeps falling beyond `max_length`. A completion truncated under the policy `penalty` gets at most -`factor`
    whatever its length, because another limit (turns, context) may have truncated it.

    Args:
        lengths_C: int64, sampled tokens.
        penalised_C: bool, truncated under the policy `penalty`.
        max_length: tokens.
        tail: number of tokens before `max_length` over which the penalty grows, 1 or more (DAPO's overlong buffer).
        factor: full penalty, 0 or more.

    Returns:
        float64, 0 or less.

    Raises:
        ValueError: `tail` is less than 1.
    """
    if tail < 1:
        raise ValueError(f"the overlong tail is {tail} tokens; it must be 1 or more")
    excess_C = lengths_C.double() - (max_length - tail)
    penalty_C = (-excess_C / tail * factor).clamp(max=0)
    return torch.where(penalised_C, penalty_C.clamp(max=-factor), penalty_C)


def _finite_in_baseline(rewards_C: Tensor, baseline_C: Tensor) -> Tensor:
    """Return rewards of B, which must be finite; 0.0 elsewhere."""
    rewards_C = torch.where(baseline_C, rewards_C.double(), 0.0)
    if not bool(torch.isfinite(rewards_C).all()):
        raise ValueError("a reward in the baseline mask is not finite; it is invalid and must be left out of the mask")
    return rewards_C
