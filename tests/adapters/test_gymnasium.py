"""Gymnasium's FrozenLake-v1, wrapped in text by a user's codec."""

import json
import re
import threading

import anyio
import pytest

from envs.adapters.gymnasium_text import GymnasiumText
from envs.factory import EnvironmentFactory
from envs.rewards.parts import merge_parts
from envs.snapshot import thaw
from stream.errors import EnvironmentFailure, ReferenceNotFoundError
from stream.validity import Measured, RewardReason, RolloutReason
from tests.adapters.episodes import completions, train
from tests.adapters.servers import HERE
from tests.cases.checks import tried
from tests.e2e.conftest import project, random_model  # noqa: F401  (fixtures)
from tests.unit.test_episode import call

CODEC = HERE / "gymnasium" / "lake.py"
ARGS = {
    "id": "FrozenLake-v1",
    "make": {"render_mode": "ansi", "is_slippery": False},
    "parse_action": f"{CODEC}:parse",
    "render": f"{CODEC}:render",
    "how": "left, down, right or up",
}
TO_THE_GOAL = ("down", "down", "right", "right", "down", "right")


def act(direction):
    return call("act", json.dumps({"action": direction}))


async def load(**args):
    return await anyio.to_thread.run_sync(EnvironmentFactory.load, "gymnasium", ARGS | args)


async def play(*directions, **args):
    factory = await load(**args)
    limits = {"max_turns": 40, "max_tool_calls": 40}
    (completion,) = await completions(factory, [*map(act, directions), "Done."], **limits)
    assert completion.failure is None, completion.failure
    return completion, thaw(completion.snapshot, factory)


async def test_reaching_the_goal_scores_1():
    completion, kept = await play(*TO_THE_GOAL)
    assert completion.prompt_messages[-1]["content"] == "Go.You are in row 0, column 0."
    assert completion.messages[1]["content"] == "You are in row 1, column 0."
    assert merge_parts(completion.parts) == Measured(1.0)
    assert (kept.terminated, kept.truncated, kept.rewards) == (True, False, [0.0] * 5 + [1.0])


async def test_falling_into_a_hole_ends_the_episode_with_reward_0():
    completion, kept = await play("right", "down", "left")
    assert completion.turns == 2
    assert merge_parts(completion.parts) == Measured(0.0)
    assert (kept.terminated, kept.actions) == (True, [2, 1])


async def test_a_time_limit_truncates_the_episode_without_terminating_it():
    _, kept = await play(*["left"] * 3, make=ARGS["make"] | {"max_episode_steps": 3})
    assert (kept.terminated, kept.truncated) == (False, True)


async def test_an_unparsable_action_is_an_error_for_the_model_and_no_step():
    completion, kept = await play("north", "down")
    assert "'north' is no direction; say one of left, down, right, up" in completion.messages[1]["content"]
    assert (completion.tool_errors, kept.actions) == (1, [1])


async def test_an_action_outside_the_space_is_an_error_for_the_model():
    completion, kept = await play("7", parse_action="builtins:int")
    assert "is not a valid action" in completion.messages[1]["content"]
    assert kept.actions == []


@pytest.mark.parametrize("directions", [(), ("north",)], ids=["no call", "illegal calls only"])
@pytest.mark.parametrize(
    ("args", "reward"),
    [
        ({}, Measured(0.0)),
        ({"no_step": -2}, Measured(-2.0)),
        ({"reward": "last", "no_step": -0.5}, Measured(-0.5)),
        ({"no_step": "invalid"}, None),
    ],
)
async def test_an_episode_without_a_step_is_worth_what_no_step_says(args, reward, directions):
    completion, _ = await play(*directions, **args)
    assert (merge_parts(completion.parts) == reward) or (
        reward is None and completion.parts[0].reward.reason is RewardReason.MISSING
    )


@pytest.mark.parametrize(("no_step", "worth"), [(0.0, "an episode without a step earns 0"), ("invalid", "is invalid")])
def test_check_warns_where_not_acting_would_pay(no_step, worth):
    """CliffWalking gives -1 for each step, which the example call of `check` does not reach: it is no direction."""
    args = ARGS | {"id": "CliffWalking-v1", "make": {"render_mode": "ansi"}, "no_step": no_step}
    report = tried("gymnasium", args=args | {"render": None})
    (warning,) = [warning for warning in report.warnings if "not acting" in warning]
    assert worth in warning
    assert "no_step" in warning
    lake = tried("gymnasium", args=ARGS)
    assert not [warning for warning in lake.warnings if "not acting" in warning]


@pytest.mark.full
@pytest.mark.timeout(400)
async def test_a_run_trains_on_the_environment(project):  # noqa: F811
    ways = {(0, 0): ("down", "right"), (0, 1): ("down",), (1, 0): ("down",), (2, 0): ("right",), (2, 1): ("down",)}
    ways |= {(3, 1): ("right",), (3, 2): ("right",)}

    def say(text, nth):
        """Go down and safely to the goal; every second time go right, into a hole."""
        (*_, (row, column)) = re.findall(r"You are in row (\d), column (\d)\.", text)
        choices = ways[int(row), int(column)]
        return act(choices[nth % len(choices)])

    trained = await train(project, "gymnasium", say, args=ARGS, max_turns=8)
    assert (trained.summary["groups_trained"], trained.summary["dead"]) == (4, 0), trained.summary
    assert trained.pushes == 5  # includes the first weights
    for step in trained.metrics:
        assert (step["reward/min"], step["reward/mean"], step["reward/max"]) == (0.0, 0.5, 1.0)
        assert step["turns/mean"] == (6 + 2) / 2


async def test_without_a_renderer_the_environments_text_is_shown():
    factory = await load(render=None)
    (completion,) = await completions(factory, [act("down"), "Done."])
    assert "SFFF" in completion.messages[1]["content"].replace("\x1b[41m", "").replace("\x1b[0m", "")


async def test_an_environment_that_raises_makes_the_completion_invalid(monkeypatch):
    def broken(*_):
        raise RuntimeError("the ice is gone")

    factory = await load()
    monkeypatch.setattr("gymnasium.envs.toy_text.frozen_lake.FrozenLakeEnv.step", broken)
    (completion,) = await completions(factory, [act("down"), "Done."])
    assert completion.failure.reason is RolloutReason.ENV_STEP
    assert "the ice is gone" in completion.failure.detail


async def test_steps_and_resets_run_in_threads(monkeypatch):
    from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

    threads = set()
    for name in ("reset", "step"):
        whole = getattr(FrozenLakeEnv, name)

        def noted(self, *args, _whole=whole, **kwargs):
            threads.add(threading.current_thread())
            return _whole(self, *args, **kwargs)

        monkeypatch.setattr(FrozenLakeEnv, name, noted)
    await play(*TO_THE_GOAL)
    assert threads
    assert threading.main_thread() not in threads


def test_later_steps_do_not_change_a_snapshot():
    import copy

    env = GymnasiumText(**ARGS)
    env.reset(seed=1)
    env.call_tool("act", {"action": "down"})
    kept = copy.copy(env)
    env.reset(seed=1)
    assert (kept.actions, kept.observation, env.actions) == ([1], 4, [])
    assert not hasattr(kept, "_env")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"parse_action": "nowhere.py:parse"}, "does not exist"),
        ({"reward": "mean"}, "'sum', 'last' or 'max'"),
        ({"reward": "last"}, "reward = 'last' needs no_step"),
        ({"no_step": True}, "it may be a finite number or 'invalid'"),
        ({"id": "NoSuchLake-v1"}, "NoSuchLake"),
        ({"slippery": True}, "takes no argument 'slippery'"),
    ],
)
def test_an_environment_that_cannot_be_made_is_an_error_at_start(args, message):
    with pytest.raises(ReferenceNotFoundError, match=message):
        EnvironmentFactory.load("gymnasium", ARGS | args)


def test_a_renderer_must_return_text():
    env = GymnasiumText(**ARGS | {"render": None, "make": {}})
    with pytest.raises(EnvironmentFailure, match="rendering raised"):
        env.reset()
