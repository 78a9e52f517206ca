import sys

import pytest

from envs.factory import EnvironmentFactory
from envs.references import Reference
from envs.rewards import RewardFunction
from envs.rewards.loading import CallOptions
from envs.snapshot import freeze
from stream.records import Completion, Failure, Group, Prompt, RewardPart
from stream.validity import Measured, RewardReason, RolloutReason, Unmeasured
from workers.role.rewards import add_reward_parts


class Pile:
    def __init__(self):
        self.things = []

    def reset(self):
        self.things = []


FACTORY = EnvironmentFactory(Reference("test", "module", Pile, sys.modules[__name__]), Pile, Pile())


def snapshot(count):
    pile = Pile()
    pile.things = list(range(count))
    return freeze(pile, 10_000)


def group_of(*completions):
    prompt = Prompt(id="train:0:0", messages=[{"role": "user", "content": "Hi"}], environment="pile")
    return Group(prompt=prompt, completions=list(completions))


def take_all(environments):
    return [len([env.things.pop() for _ in range(len(env.things))]) for env in environments]


async def test_every_function_adds_a_part_and_gets_its_own_environments():
    group = group_of(*(Completion(index=i, snapshot=snapshot(i + 1)) for i in range(2)))
    functions = [RewardFunction(take_all, "first", weight=2.0), RewardFunction(take_all, "second")]
    await add_reward_parts(group, functions, {"pile": FACTORY}, timeout_s=5)
    for i, completion in enumerate(group.completions):
        assert completion.parts == [
            RewardPart(name="first", reward=Measured(i + 1.0), weight=2.0),
            RewardPart(name="second", reward=Measured(i + 1.0)),
        ]


async def test_an_unreadable_snapshot_makes_only_its_completion_unmeasured():
    whole, torn, none = (Completion(index=i, snapshot=s) for i, s in enumerate((snapshot(3), b"\xc1", None)))
    await add_reward_parts(
        group_of(torn, whole, none), [RewardFunction(take_all, "count")], {"pile": FACTORY}, timeout_s=5
    )
    assert whole.parts[0].reward == Measured(3.0)
    for completion in (torn, none):
        assert isinstance(completion.parts[0].reward, Unmeasured)
        assert completion.parts[0].reward.reason is RewardReason.RAISED
        assert "snapshot cannot be read" in completion.parts[0].reward.detail


LARGE = 9_000
"""Things that exceed the limit of a snapshot here."""


@pytest.mark.parametrize("granularity", ["group", "row"])
@pytest.mark.parametrize("worst", [None, 0.0, -3.0])
async def test_a_snapshot_over_the_limit_costs_its_own_completion_the_worst_value_and_no_sibling_anything(
    granularity, worst
):
    sizes = [LARGE, 2, LARGE, 3]
    group = group_of(*(Completion(index=i, snapshot=snapshot(size)) for i, size in enumerate(sizes)))
    options = CallOptions(granularity=granularity, worst_value=worst)
    function = RewardFunction(take_all, "count", call_options=options)
    await add_reward_parts(group, [function], {"pile": FACTORY}, timeout_s=5)
    first, *_ = rewards = [completion.parts[0].reward for completion in group.completions]
    assert [rewards[1], rewards[3]] == [Measured(2.0), Measured(3.0)]
    assert rewards[2] == first
    assert first.reason is RewardReason.RAISED
    assert "count reads things, which exceeds rollout.max_snapshot_bytes" in first.detail
    assert first.value == worst if worst is not None else isinstance(first, Unmeasured)


async def test_a_function_that_fails_for_another_reason_is_called_once_and_blames_no_snapshot():
    calls = []

    def broken(environments):
        calls.append(len(environments))
        raise ValueError("no")

    group = group_of(*(Completion(index=i, snapshot=snapshot(size)) for i, size in enumerate([LARGE, 2])))
    function = RewardFunction(broken, "count", call_options=CallOptions(worst_value=0.0))
    await add_reward_parts(group, [function], {"pile": FACTORY}, timeout_s=5)
    assert calls == [2]
    assert all(isinstance(completion.parts[0].reward, Unmeasured) for completion in group.completions)


async def test_a_function_that_does_not_read_what_was_too_large_measures_everything():
    group = group_of(*(Completion(index=i, snapshot=snapshot(size)) for i, size in enumerate([LARGE, 2])))
    await add_reward_parts(group, [RewardFunction(lambda environments: [1.0] * 2, "one")], {"pile": FACTORY}, 5)
    assert [completion.parts[0].reward for completion in group.completions] == [Measured(1.0)] * 2


async def test_a_failed_completion_is_not_measured():
    failed = Completion(index=0, failure=Failure(reason=RolloutReason.ENGINE))
    asked = []
    await add_reward_parts(group_of(failed), [RewardFunction(asked.append, "never")], {"pile": FACTORY}, timeout_s=5)
    assert (failed.parts, asked) == ([], [])
