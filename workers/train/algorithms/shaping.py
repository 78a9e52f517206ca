"""Reward shaping: changes to measured rewards before they are compared.

Rewards outside B (never measured, not finite, excluded) stay 0.0 and are not clipped into a number. A
reward in B is finite by definition of B; one that is not, before or after shaping, is an error.

Group filters say which groups are worth training on. They look at B, after the truncation policy and before reward
shaping. All except `min_valid_rows` keep a group without a completion in B, which is dropped for that reason before.
The name of a filter is the reason that is counted.

Completions that are trained at the reward 0 count in no statistic: an estimator never sees them. Within a group its
advantages lie on a straight line over the rewards (`affine` in its traits): a completion whose reward is 0 gets the
value of that line at 0. For `grpo` this is (0 - mean) / (std + eps), with mean and std of the group's completions in
B.
"""

import torch
from torch import Tensor

from workers.train.algorithms.grouping import Grouping, tolerant_difference
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


FILTERS: Registry[None] = Registry(
    "group filter",
    {
        "rewards_C": "float64, after the truncation policy; anything outside B",
        "groups": "Grouping over B",
        "advantages_C": "float64; anything outside B",
    },
)
"""Filters by name. Each returns bool (G), the groups that it keeps."""


@FILTERS.register("min_valid_rows", None, formula="keep where n >= min_valid_rows", source="validity contract")
def min_valid_rows(groups: Grouping, *, min_valid_rows: int) -> Tensor:
    """Keep groups with at least this many completions in B; with only two, GRPO always gives ±0.707."""
    return groups.count_G >= min_valid_rows


@FILTERS.register(
    "zero_variance",
    None,
    formula="keep where n < 2, or not all r are equal",
    source="Yu et al. 2025, DAPO, arXiv:2503.14476, dynamic sampling",
)
def zero_variance(rewards_C: Tensor, groups: Grouping) -> Tensor:
    """Keep groups whose rewards differ, compared exactly; a single completion is left to `single_sample_policy`."""
    return (groups.count_G < 2) | ~groups.tied(rewards_C)


@FILTERS.register(
    "difficulty",
    None,
    formula="keep where min_mean_reward <= mean r <= max_mean_reward",
    source="AReaL docs, should_accept_fn",
)
def difficulty(rewards_C: Tensor, groups: Grouping, *, min_mean_reward: float, max_mean_reward: float) -> Tensor:
    """Keep groups neither too hard nor too easy; the bounds are inclusive."""
    return _within(groups.mean(rewards_C), groups, min_mean_reward, max_mean_reward)


@FILTERS.register(
    "advantage_bounds",
    None,
    formula="keep where min_advantage <= max |A| <= max_advantage",
    source="validity contract",
)
def advantage_bounds(advantages_C: Tensor, groups: Grouping, *, min_advantage: float, max_advantage: float) -> Tensor:
    """Keep groups whose largest absolute advantage lies within the bounds, inclusive."""
    return _within(groups.max(advantages_C.abs()), groups, min_advantage, max_advantage)


def _within(values_G: Tensor, groups: Grouping, lower: float, upper: float) -> Tensor:
    """Return groups within the bounds, which are inclusive up to rounding; empty groups count as within."""
    over, under = (tolerant_difference(values_G, values_G.new_tensor(bound)) for bound in (lower, upper))
    return (groups.count_G == 0) | ((over >= 0) & (under <= 0))


def at_zero_reward(
    advantages_C: Tensor, rewards_C: Tensor, groups: Grouping, outside_C: Tensor, *, bounded: bool
) -> Tensor:
    """Give completions outside B the advantage that the reward 0 has among the completions of their group in B.

    It is 0 where these have equal rewards, or where there are fewer than two: then nothing tells what a difference of
    rewards is worth.

    Args:
        advantages_C: of an estimator that is affine within each group; anything outside B.
        rewards_C: what these advantages came from, clipped and not normalized; anything outside B.
        groups: of the completions; its valid members are B.
        outside_C: bool, completions to give an advantage to, none of them in B.
        bounded: the estimator divides by the group's standard deviation. Where that is small, 0 lies many of them away,
            so the result is limited to n / sqrt(n + 1) of them, the most that a member of a group of n + 1 can have.

    Returns:
        float64: `advantages_C`, with these values where `outside_C`.
    """
    advantages_C, valid_C = advantages_C.double(), groups.valid_C
    highest_C = groups.broadcast(groups.max(rewards_C))
    lowest_C = -groups.broadcast(groups.max(-rewards_C))
    best_C, worst_C = (valid_C & (rewards_C == bound_C) for bound_C in (highest_C, lowest_C))
    one_C, other_C = (groups.broadcast(_mean(groups, advantages_C, which_C)) for which_C in (best_C, worst_C))
    is_compared_C = outside_C & (groups.broadcast(groups.count_G) > 1) & (highest_C > lowest_C)
    slope_C = torch.where(is_compared_C, one_C - other_C, 0.0) / torch.where(is_compared_C, highest_C - lowest_C, 1.0)
    found_C = torch.where(is_compared_C, one_C - slope_C * torch.where(is_compared_C, highest_C, 0.0), 0.0)
    if bounded:
        number_G, middle_G = groups.count_G, groups.mean(advantages_C)
        reach_G = groups.std(groups.centred(advantages_C)) * number_G / (number_G + 1).sqrt()
        low_C, high_C = (groups.broadcast(middle_G + sign * reach_G) for sign in (-1, 1))
        found_C = torch.where(is_compared_C, found_C.clamp(low_C, high_C), 0.0)
    return torch.where(outside_C, found_C, advantages_C)


def _mean(groups: Grouping, values_C: Tensor, which_C: Tensor) -> Tensor:
    """Return each group's mean over these of its valid members; 0 without any."""
    return groups.sum(torch.where(which_C, values_C, 0.0)) / groups.sum(which_C).clamp(min=1)
