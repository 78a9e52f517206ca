"""Advantages of completions that are trained at the reward 0 and count in no statistic.

An estimator never sees them. Within a group its advantages lie on a straight line over the rewards (`affine` in its
traits): a completion whose reward is 0 gets the value of that line at 0. For `grpo` this is (0 - mean) / (std + eps),
with mean and std of the group's completions in B.
"""

import torch
from torch import Tensor

from workers.train.algorithms.grouping import Grouping


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
