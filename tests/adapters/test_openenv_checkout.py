"""`echo_env` from a checkout of OpenEnv's repository at v0.3.0, which `PENSTOCK_OPENENV` names."""

import anyio
import pytest

from envs.factory import EnvironmentFactory
from envs.snapshot import thaw
from stream.validity import RewardReason
from tests.adapters.episodes import completions, train
from tests.adapters.servers import checkout, openenv_server
from tests.e2e.conftest import project, random_model  # noqa: F401  (fixtures)
from tests.unit.test_episode import call

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The address of the checkout's server."""
    folder = checkout("PENSTOCK_OPENENV") / "envs"
    with openenv_server("echo_env.server.app:app", tmp_path_factory.mktemp("echo"), folder) as result:
        yield result


@pytest.fixture(scope="module")
def factory(url):
    """A factory of environments whose server measures nothing."""
    return EnvironmentFactory.load(f"openenv:{url}", {"reward": "none"})


async def test_an_environment_has_tools_and_answers_calls(factory):
    assert [tool.name for tool in factory.tools] == ["echo_message", "echo_with_length"]
    says = [call("echo_message", '{"message": "hi"}'), call("echo_with_length", '{"message": "four"}'), "Done."]
    (completion,) = await completions(factory, says)
    answers = [message["content"] for message in completion.messages if message["role"] == "tool"]
    assert answers == ["hi", '{"message": "four", "length": 4}']
    assert [step["tool"] for step in thaw(completion.snapshot, factory).calls] == ["echo_message", "echo_with_length"]


async def test_a_missing_reward_is_unmeasured(url):
    rewarded = await anyio.to_thread.run_sync(EnvironmentFactory.load, f"openenv:{url}")
    (completion,) = await completions(rewarded, [call("echo_message", '{"message": "hi"}'), "Done."])
    assert completion.parts[0].reward.reason is RewardReason.MISSING


async def test_a_run_trains_over_the_websocket(factory, project):  # noqa: F811
    (project.folder / "echoed.py").write_text(
        "def echoed(environments, **columns):\n"
        "    return [float(env.calls[0]['observation']['result']['data'] == '1') for env in environments]\n"
    )

    def say(text, nth):
        return "Done." if "<tool_response>" in text else call("echo_message", f'{{"message": "{nth % 2}"}}')

    reward = f"{project.folder}/echoed.py:echoed"
    trained = await train(project, factory.ref, say, args={"reward": "none"}, reward=reward)
    assert (trained.summary["groups_trained"], trained.summary["dead"]) == (4, 0), trained.summary
    assert trained.pushes == 5  # includes the first weights
    assert any("<tool_response>1</tool_response>" in text for text in trained.asked)
    for step in trained.metrics:
        assert (step["reward/min"], step["reward/mean"], step["reward/max"]) == (0.0, 0.5, 1.0)
