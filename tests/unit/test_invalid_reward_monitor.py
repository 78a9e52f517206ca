"""The monitor of invalid rewards counts reasons by environment, over a full window."""

import pytest

from stream.errors import RunFailedError
from stream.records import Completion, Failure, Group, Prompt
from stream.validity import Measured, RewardReason, RolloutReason, Unmeasured
from workers.train.groups.invalid_reward_monitor import InvalidRewardMonitor


def group(*rewards, environment="e", failures=()):
    completions = [Completion(index=i, reward=reward) for i, reward in enumerate(rewards)]
    completions += [Completion(index=9, failure=Failure(reason=reason)) for reason in failures]
    prompt = Prompt(id="d:0:0", messages=[], environment=environment)
    return Group(prompt=prompt, completions=completions)


GOOD = Measured(1.0)
TIMEOUT = Unmeasured(RewardReason.TIMEOUT)
RAISED = Unmeasured(RewardReason.RAISED)


def test_a_healthy_run_continues():
    guard = InvalidRewardMonitor(0.2, 4)
    for _ in range(20):
        guard.observe(group(GOOD, GOOD, GOOD, GOOD, TIMEOUT))


def test_a_reason_above_the_limit_ends_the_run_and_is_named():
    guard = InvalidRewardMonitor(0.2, 4)
    for _ in range(3):
        guard.observe(group(GOOD, GOOD, TIMEOUT))
    with pytest.raises(RunFailedError, match=r"4 of the last 12 completions of e .* reward:timeout"):
        guard.observe(group(GOOD, GOOD, TIMEOUT))


def test_two_reasons_below_the_limit_are_not_added_up():
    guard = InvalidRewardMonitor(0.4, 2)
    guard.observe(group(GOOD, TIMEOUT, RAISED))
    guard.observe(group(GOOD, TIMEOUT, RAISED))


def test_environments_are_counted_separately():
    guard = InvalidRewardMonitor(0.5, 2)
    for _ in range(2):
        guard.observe(group(GOOD, environment="good"))
    guard.observe(group(TIMEOUT, environment="bad"))
    with pytest.raises(RunFailedError, match="bad"):
        guard.observe(group(TIMEOUT, environment="bad"))


def test_failed_rollouts_count_by_their_own_reason():
    guard = InvalidRewardMonitor(0.2, 1)
    with pytest.raises(RunFailedError, match="failed:engine"):
        guard.observe(group(GOOD, failures=[RolloutReason.ENGINE]))


def test_a_greedy_completion_counts_like_any_other():
    greedy = Completion(index=1, greedy=True, reward=TIMEOUT)
    one = Group(prompt=Prompt(id="d:0:0", messages=[], environment="e"), completions=[Completion(index=0), greedy])
    one.completions[0].reward = GOOD
    guard = InvalidRewardMonitor(0.4, 2)
    guard.observe(one)
    with pytest.raises(RunFailedError, match=r"2 of the last 4 completions .* reward:timeout"):
        guard.observe(one)


def test_groups_outside_the_window_do_not_count():
    guard = InvalidRewardMonitor(0.5, 2)
    guard.observe(group(TIMEOUT, TIMEOUT))
    for _ in range(3):
        guard.observe(group(GOOD, GOOD))
