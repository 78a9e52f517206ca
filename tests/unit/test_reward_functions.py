import sys

from envs.factory import EnvironmentFactory
from envs.references import Reference
from envs.rewards import RewardFunction
from envs.snapshot import freeze
from stream.records import Completion, Failure, Group, Prompt, RewardPart
from stream.validity import Measured, RewardReason, RolloutReason, Unmeasured
from workers.runtime.reward_functions import add_reward_parts


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


async def test_a_failed_completion_is_not_measured():
    failed = Completion(index=0, failure=Failure(reason=RolloutReason.ENGINE))
    asked = []
    await add_reward_parts(group_of(failed), [RewardFunction(asked.append, "never")], {"pile": FACTORY}, timeout_s=5)
    assert (failed.parts, asked) == ([], [])
