"""Merged parts of a reward: a sum of measured values, or unmeasured."""

import pytest

from envs.rewards.parts import merge_parts
from stream.records import RewardPart
from stream.validity import Measured, RewardReason, Unmeasured


def part(value, weight=1.0, name="a", turn=None):
    reward = value if isinstance(value, Unmeasured) else Measured(value)
    return RewardPart(name=name, reward=reward, weight=weight, turn=turn)


TIMEOUT = Unmeasured(RewardReason.TIMEOUT, "30 s")


def test_the_parts_are_summed_by_weight():
    assert merge_parts([part(1.0), part(0.5, weight=-2.0), part(4.0, weight=0.25)]) == Measured(1.0)


def test_a_single_part_is_weighted_too():
    assert merge_parts([part(3.0, weight=0.5)]) == Measured(1.5)


def test_without_parts_there_is_no_reward():
    assert merge_parts([]).reason is RewardReason.MISSING


def test_the_only_part_keeps_its_own_reason():
    assert merge_parts([part(TIMEOUT)]) == TIMEOUT


def test_one_unmeasured_part_of_several_leaves_no_reward_and_is_named():
    merged = merge_parts([part(1.0, name="env"), part(TIMEOUT, name="judge", turn=2)])
    assert merged.reason is RewardReason.COMPONENT
    assert merged.detail == "judge (turn 2): timeout 30 s"


def test_rewards_of_turns_are_summed_with_the_others():
    turns = [part(0.25, name="env", turn=0), part(-1.0, name="env", turn=1)]
    assert merge_parts(turns) == Measured(-0.75)
    assert merge_parts([*turns, part(4.0, weight=0.5)]) == Measured(1.25)


def test_one_unmeasured_turn_leaves_no_reward_and_is_named():
    merged = merge_parts([part(0.25, name="env", turn=0), part(TIMEOUT, name="env", turn=1)])
    assert merged == Unmeasured(RewardReason.COMPONENT, "env (turn 1): timeout 30 s")


def test_a_part_of_weight_0_is_required_like_any_other():
    assert merge_parts([part(1.0), part(TIMEOUT, weight=0.0)]).reason is RewardReason.COMPONENT


@pytest.mark.parametrize(
    "parts", [[part(1e308), part(1e308)], [part(1e308, weight=10.0)], [part(1e308, 9e9), part(-1e308, 9e9)]]
)
def test_a_sum_that_overflows_is_unmeasured(parts):
    assert merge_parts(parts).reason is RewardReason.NOT_FINITE


@pytest.mark.parametrize(
    "parts", [[part(1e18, weight=2.0)], [part(1e18), part(1e18)], [part(1e18, 9.0), part(-1e18, 9.0)]]
)
def test_a_weighted_part_or_a_sum_beyond_the_largest_reward_is_no_reward(parts):
    assert merge_parts(parts).reason is RewardReason.TOO_LARGE
    assert merge_parts([part(1e18)]) == Measured(1e18)


def test_the_reason_of_a_measured_part_is_kept():
    hung = RewardPart(name="math", reward=Measured(0.0, RewardReason.TIMEOUT, "30 s"))
    assert merge_parts([part(0.25, name="format"), hung]) == Measured(0.25, RewardReason.TIMEOUT, "math: 30 s")
