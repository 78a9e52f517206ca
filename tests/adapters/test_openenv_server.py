"""Unmodified OpenEnv servers, each a process in a separate virtual environment."""

import json

import anyio
import pytest

from envs.adapters.openenv import openenv
from envs.factory import EnvironmentFactory
from envs.rewards.parts import merge_parts
from envs.snapshot import thaw
from stream.errors import EnvironmentFailure
from stream.validity import Measured, RewardReason, RolloutReason
from tests.adapters.episodes import completions, train
from tests.adapters.servers import HERE, openenv_init, openenv_server
from tests.e2e.conftest import project, random_model  # noqa: F401  (fixtures)
from tests.unit.test_episode import call

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """The environment that `openenv init echo_env` makes from the template in openenv-core."""
    return openenv_init(tmp_path_factory.mktemp("template"))


@pytest.fixture(scope="module")
def echo(template):
    """A server of that environment, unchanged, for several sessions."""
    with openenv_server("echo_app:app", template.parent, HERE / "openenv", template) as url:
        yield url


@pytest.fixture(scope="module")
def wordle(tmp_path_factory):
    """OpenEnv's server code with a Wordle that fails on request."""
    folder = tmp_path_factory.mktemp("wordle")
    with openenv_server("wordle_server:app", folder, HERE / "openenv") as url:
        yield url


async def load(url, **args):
    return await anyio.to_thread.run_sync(EnvironmentFactory.load, f"openenv:{url}", args)


def guess(word):
    return call("step", json.dumps({"message": f"[{word}]"}))


def echoing(text):
    return call("step", json.dumps({"message": text}))


async def test_the_template_environment_has_one_tool_with_the_actions_schema(echo):
    factory = await load(echo)
    (tool,) = [tool.schema["function"] for tool in factory.tools]
    assert (tool["name"], tool["parameters"]["required"]) == ("step", ["message"])
    assert list(tool["parameters"]["properties"]) == ["message"]
    assert tool["parameters"]["properties"]["message"]["description"] == "Message to echo back"
    (completion,) = await completions(factory, [echoing("four"), "Done."])
    assert "Echo Env environment ready!" in completion.prompt_messages[-1]["content"]
    assert json.loads(completion.messages[1]["content"])["message_length"] == 4
    kept = thaw(completion.snapshot, factory)
    assert [step["observation"]["echoed_message"] for step in kept.calls] == ["four"]


async def test_the_template_environment_scores_a_tenth_per_character(echo):
    says = [echoing("four"), echoing("seven77"), "Done."]
    values = {}
    for how in ("sum", "last", "max"):
        (completion,) = await completions(await load(echo, reward=how, no_step=0.0), says)
        values[how] = merge_parts(completion.parts)
    assert values == {
        "sum": Measured(pytest.approx(1.1)),
        "last": Measured(pytest.approx(0.7)),
        "max": Measured(pytest.approx(0.7)),
    }


async def test_an_episode_without_a_step_is_worth_what_no_step_says(echo):
    (completion,) = await completions(await load(echo), ["Done."])
    assert merge_parts(completion.parts) == Measured(0.0)
    (completion,) = await completions(await load(echo, no_step="invalid"), ["Done."])
    assert completion.parts[0].reward.reason is RewardReason.MISSING


async def test_the_template_app_refuses_a_second_session(template):
    with openenv_server("server.app:app", template, template) as url:
        result = await completions(await load(url), [echoing("four"), "Done."], n=2)
    (failed,) = [each.failure for each in result if each.failure]
    assert failed.reason is RolloutReason.ENV_RESET
    assert "CAPACITY_REACHED" in failed.detail
    assert [merge_parts(each.parts) for each in result if not each.failure] == [Measured(pytest.approx(0.4))]


async def test_a_run_trains_on_the_template_environment(echo, project):  # noqa: F811
    def say(text, nth):
        return "Done." if "<tool_response>" in text else echoing("a" * (nth + 1))

    trained = await train(project, f"openenv:{echo}", say)
    assert (trained.summary["groups_trained"], trained.summary["dead"]) == (4, 0), trained.summary
    assert trained.pushes == 5  # includes the first weights
    for step in trained.metrics:
        assert (step["reward/count"], step["turns/mean"]) == (4, 2.0)
        assert (step["reward/min"], step["reward/max"]) == (pytest.approx(0.1), pytest.approx(0.4))


async def test_the_episode_after_a_cancelled_call_reads_its_own_reward(wordle):
    """Upstream issue 1143."""
    env = openenv(wordle, reward="last", no_step=0.0)
    await env.reset()
    with anyio.move_on_after(0.2) as scope:
        await env.call_tool("step", {"message": "[slow]"})
    assert scope.cancelled_caught
    with pytest.raises(EnvironmentFailure):
        env.get_reward()
    await env.reset()
    await anyio.sleep(1.2)  # by now the old session has answered to a closed socket
    await env.call_tool("step", {"message": "[0.999]"})
    assert env.get_reward() == 0.999
    await env.close()


async def test_a_nan_reward_is_null_on_the_wire_and_makes_the_completion_invalid(wordle):
    (completion,) = await completions(await load(wordle), [guess("slate"), guess("nan"), "Done."])
    assert completion.failure is None
    assert completion.parts[0].reward.reason is RewardReason.MISSING


async def test_the_model_reads_what_the_environment_raises_and_the_episode_goes_on(wordle):
    factory = await load(wordle)
    (completion,) = await completions(factory, [guess("raise"), guess("crane"), "Done."])
    assert completion.failure is None
    assert "the word list is gone" in completion.messages[1]["content"]
    assert merge_parts(completion.parts) == Measured(1.0)
    result = await completions(factory, [guess("slate"), guess("crane"), guess("crane"), "Done."], n=4)
    assert [merge_parts(each.parts) for each in result] == [Measured(1.2)] * 4
    assert [len(each.messages) for each in result] == [4] * 4, "the server says that the game is over after two guesses"


async def test_unknown_arguments_of_an_action_are_an_error_for_the_model(wordle):
    says = [call("step", '{"word": "crane"}'), guess("crane"), "Done."]
    (completion,) = await completions(await load(wordle, reward="last", no_step=0.0), says)
    assert "do not fit" in completion.messages[1]["content"]
    assert merge_parts(completion.parts) == Measured(1.0)
