"""Classes and reward functions in TRL's style run unmodified; reward functions receive frozen snapshots.

Two tests cover the two halves of a snapshot: without the freeze to bytes
`test_the_next_episode_does_not_change_the_snapshot` fails, without the copy before it
`test_a_custom_copy_drops_the_handle`.
"""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers.utils import get_json_schema

from envs.factory import EnvironmentFactory
from envs.rewards import RewardFunction
from envs.tools import tool_specs
from stream.records import Prompt
from stream.validity import Measured, RewardReason, Unmeasured
from workers.check.scripted import ScriptedSampler, call, play, scripted_chat
from workers.rollout.chat.chat_setup import ChatSetup
from workers.rollout.environment_pool import EnvironmentPool
from workers.rollout.group import GroupRunner
from workers.rollout.tool_formats import TOOL_FORMATS
from workers.score.worker import score_group
from workers.settings import RolloutSettings

FILE = Path(__file__).parents[1] / "cases" / "trl_style.py"


def ref(name):
    return f"{FILE}:{name}"


def test_an_environment_that_chooses_its_own_task_scores_itself():
    played = play(ref("Increment"), [call("increment", step=1)] * 6)
    target = played.environment.target
    assert played.messages[0]["content"] == f"Raise the counter by {target}."
    assert played.tool_replies == ["1", "2", "3", "4", "5", "6"]
    assert played.reward_value == (target == 6)


def test_reset_reads_the_row_and_reward_functions_read_the_state():
    prompt = [{"role": "user", "content": "Raise the counter to 3."}]
    rewards = [ref("by_target"), ref("has_answer")]
    played = play(
        ref("IncrementTo"),
        [call("increment", step=3), "Answer: 3"],
        prompt=prompt,
        fields={"target": 3},
        rewards=rewards,
    )
    assert {part.name: part.reward for part in played.parts} == dict.fromkeys(
        ("env", "by_target", "has_answer"), Measured(1.0)
    )


def test_done_ends_the_episode_after_the_turn_and_the_state_is_scored():
    moves = [call("move", direction="left"), call("move", direction="right")]
    played = play(ref("Slide"), [moves, "unused"], rewards=[ref("from_score")])
    assert played.unused_turns == ["unused"]
    assert played.tool_replies == ["4 0 0\n8 0 0", "Error: ValueError: Game over."]
    assert played.reward_value == 12.0
    assert played.environment._render() == "4 0 0\n8 0 0"


def test_a_client_made_in_init_is_kept_from_episode_to_episode():
    turns = [call("guess", word="crate"), call("guess", word="crane"), call("guess", word="brine")]
    played = play(ref("Words"), turns, rewards=[ref("from_reward")])
    assert played.tool_replies == ["\ncrate GGGXG", "\ncrane GGGGG"]
    assert len(played.unused_turns) == 1  # `done` ends the episode
    assert played.reward_value == 1.0


def test_async_members_are_awaited():
    played = play(ref("Shouting"), [[call("shout", text="a"), call("shout", text="b")]])
    assert played.tool_replies == ["A", "B"]
    assert played.reward_value == 1.0


def test_a_reward_function_may_branch_on_the_environment_class():
    assert play(ref("Coding"), [call("run_code", code="6 * 7")], rewards=[ref("by_kind")]).reward_value == 1.0
    other = play(ref("Words"), [], rewards=[ref("by_kind")])
    assert isinstance(other.reward, Unmeasured)
    assert other.reward.reason is RewardReason.MISSING


@pytest.mark.parametrize("name", ["Increment", "IncrementTo", "Slide", "Words", "Coding", "Shouting"])
def test_schemas_of_tools_in_trls_style_equal_trls(name):
    """TRL makes its schemas with transformers' `get_json_schema`."""
    env = EnvironmentFactory.load(ref(name)).make()
    for spec in tool_specs(env):
        assert spec.schema == get_json_schema(getattr(env, spec.name))
        assert spec.problems == ()


def described(
    how: str,
    count: int,
    ratio: float,
    sure: bool,
    words: list[str],
    table: dict[str, int],
    anything: list,
    either: int | str,
    maybe: str | None = None,
    unit: str = "celsius",
) -> dict:
    """
    Every kind of hint that transformers knows.

    Args:
        how: In words,
            over two lines.
        count: A number.
        ratio: Another.
        sure: Whether.
        words: Some.
        table: By name.
        anything: At all.
        either: One or the other.
        maybe: Or nothing.
        unit: Of temperature (choices: ["celsius", "fahrenheit"])

    Returns:
        What came of it.
    """


def test_schemas_that_differ_from_transformers_have_more_information():
    """List all differences, over every kind of hint that transformers has a schema for."""

    class Env:
        def reset(self): ...

    Env.described = staticmethod(described)
    (ours,) = [spec.schema["function"] for spec in tool_specs(Env())]
    theirs = get_json_schema(described)["function"]
    assert {key: ours[key] for key in ("name", "description", "return")} == {
        key: theirs[key] for key in ("name", "description", "return")
    }
    assert ours["parameters"]["required"] == theirs["parameters"]["required"]
    mine, other = ours["parameters"]["properties"], theirs["parameters"]["properties"]
    assert list(mine) == list(other)
    different = {name: (mine[name], other[name]) for name in mine if mine[name] != other[name]}
    assert different == {
        # Both forms are valid; this is the form of unions of any kind.
        "either": (
            {"anyOf": [{"type": "integer"}, {"type": "string"}], "description": "One or the other."},
            {"type": ["integer", "string"], "description": "One or the other."},
        ),
        # `nullable` is from OpenAPI, unknown to JSON schema; and the default is included.
        "maybe": (
            {"anyOf": [{"type": "string"}, {"type": "null"}], "description": "Or nothing.", "default": None},
            {"type": "string", "nullable": True, "description": "Or nothing."},
        ),
        "unit": (
            {
                "type": "string",
                "enum": ["celsius", "fahrenheit"],
                "description": "Of temperature",
                "default": "celsius",
            },
            {"type": "string", "enum": ["celsius", "fahrenheit"], "description": "Of temperature"},
        ),
    }


def test_choices_in_a_docstring_are_validated():
    class Env:
        def reset(self): ...

        def warm(self, unit: str):
            """Warm up.

            Args:
                unit: Of temperature (choices: ["celsius", "fahrenheit"])
            """
            return unit

    played = play(Env, [call("warm", unit="kelvin"), call("warm", unit="celsius")])
    assert played.tool_replies == [
        'Error: warm: unit: expected one of "celsius", "fahrenheit", got "kelvin"',
        "celsius",
    ]


# Snapshots, through the rollout worker's and the scorer's own code


@dataclasses.dataclass
class Inner:
    moves: list


class Mutable:
    """Reuses one object of each kind for all its episodes, and changes it in place."""

    def __init__(self):
        self.a_list, self.a_dict, self.an_array = [], {}, np.zeros(2)
        self.nested = Inner([])

    def reset(self, number, **row):
        self.a_list.clear()
        self.a_dict.clear()
        self.nested.moves.clear()
        self.an_array[:] = number
        self.a_list.append(number)
        self.a_dict["number"] = number
        self.nested.moves.append([number])


def factory_of(cls):
    return EnvironmentFactory.from_callable(cls)


async def scored(cls, read, numbers=(1, 2)):
    """Run successive episodes in one slot; after all of them, a reward function reads each snapshot."""
    factories = {"env": factory_of(cls)}
    function = RewardFunction(lambda environments, **columns: [float(read(env)) for env in environments], "read")
    groups = []
    async with EnvironmentPool(factories, size=1) as pool:
        chats = {"env": ChatSetup(scripted_chat(), TOOL_FORMATS["hermes"])}
        for number in numbers:
            prompt = Prompt(id=f"p{number}", messages=[{"role": "user", "content": "go"}], fields={"number": number})
            prompt.environment, prompt.group_size = "env", 1
            runner = GroupRunner(chats=chats, sampler=ScriptedSampler(["done"]), pool=pool, limits=RolloutSettings())
            groups.append(await runner.run(prompt))
    for group in groups:
        await score_group(group, [function], factories, 5.0)
    return [group.completions[0].reward for group in groups]


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda env: env.a_list[0], id="list"),
        pytest.param(lambda env: env.a_dict["number"], id="dict"),
        pytest.param(lambda env: env.nested.moves[0][0], id="nested dataclass"),
        pytest.param(lambda env: env.an_array[1], id="numpy array"),
    ],
)
async def test_the_next_episode_does_not_change_the_snapshot(read):
    scripted_chat()  # made here: it builds a tokenizer
    assert await scored(Mutable, read) == [Measured(1.0), Measured(2.0)]


class Socket:
    """Its attributes could be frozen, but it must not be."""

    def __init__(self):
        self.secret = "a token"


class Handled:
    def __init__(self):
        self.socket = Socket()
        self.number = 0

    def __copy__(self):
        kept = object.__new__(type(self))
        kept.number = self.number
        return kept

    def reset(self, number, **row):
        self.number = number


async def test_a_custom_copy_drops_the_handle():
    assert await scored(Handled, lambda env: env.number if not hasattr(env, "socket") else -1) == [
        Measured(1.0),
        Measured(2.0),
    ]


class Private:
    """Its reward is a property over a private attribute in a slot."""

    __slots__ = ("__weakref__", "_score")

    def reset(self, number, **row):
        self._score = {"number": number}

    @property
    def reward(self):
        return self._score["number"] * 10


async def test_a_property_over_a_private_attribute_works_on_the_snapshot():
    assert await scored(Private, lambda env: env.reward) == [Measured(10.0), Measured(20.0)]


async def test_a_reward_function_cannot_change_the_snapshot_of_the_next_one():
    assert await scored(Mutable, lambda env: env.a_list.pop()) == [Measured(1.0), Measured(2.0)]
    assert sys.modules[Mutable.__module__].Mutable is Mutable
