"""An environment server of verifiers 0.4 in a separate virtual environment, with a bundled environment."""

import os

import anyio
import pytest

from envs.factory import EnvironmentFactory
from envs.rewards.parts import merge_parts
from stream.errors import EngineError
from stream.validity import Measured, RolloutReason
from tests.adapters.episodes import completions, train
from tests.adapters.servers import HERE, openenv_server, serving, virtual_environment
from tests.cases.ports import free_port
from tests.e2e.conftest import project, random_model  # noqa: F401  (fixtures)
from tests.unit.test_episode import END, TOKENIZER, Scripted, ids

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def factory(tmp_path_factory):
    """A factory for the OpenEnv environment of verifiers, which plays the Wordle of a server beside it."""
    folder = tmp_path_factory.mktemp("verifiers")
    python = virtual_environment("verifiers", "verifiers[openenv]==0.4.0", "uv")
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    with openenv_server("wordle_server:app", folder, HERE / "openenv") as wordle:
        port, url = free_port(), wordle.replace("ws://", "http://")
        command = [python, HERE / "verifiers" / "serve.py", f"tcp://127.0.0.1:{port}", url]
        with serving(command, port, folder, {"PATH": path}):
            task = {"name": "wordle", "base_url": url, "use_docker": False, "provider_kwargs": {}, "reset": {}}
            args = {"task": task, "nulls": ["env"], "prompt": False, "health_timeout_s": 60.0}
            result = EnvironmentFactory.load(f"verifiers:tcp://127.0.0.1:{port}", args)
            result.args = args  # for the test that writes them into a settings file
            yield result


async def test_the_server_scores_the_episode_and_the_worker_records_the_sampled_tokens(factory):
    (completion,) = await completions(factory, ["[slate]", "[crane]"])
    assert completion.failure is None, completion.failure
    assert completion.turns == 2
    assert merge_parts(completion.parts) == Measured(0.2 + 1.0)  # two letters of slate are where crane has them
    (row,) = completion.rows
    turns = [TOKENIZER.decode(row.tokens[a:b].tolist(), skip_special_tokens=False) for a, b in row.sampled_ranges]
    assert turns == [f"[slate]{END}", f"[crane]{END}"]
    assert [row.tokens[a:b].tolist() for a, b in row.sampled_ranges] == [ids(f"[slate]{END}"), ids(f"[crane]{END}")]


async def test_a_failing_engine_makes_the_completion_invalid_though_the_server_scores_0(factory):
    def script(turn, _text):
        return "[slate]" if turn == 0 else EngineError("the engine is out of order")

    (completion,) = await completions(factory, Scripted(script))
    assert completion.failure is not None
    assert completion.failure.reason is RolloutReason.ENGINE


async def test_a_useless_answer_is_scored(factory):
    (completion,) = await completions(factory, ["apple"] * 8, max_turns=2)
    assert completion.failure is None, completion.failure
    assert completion.turns == 2
    assert merge_parts(completion.parts) == Measured(0.0)


async def test_a_truncated_episode_is_cancelled_at_the_server_and_does_not_affect_the_next(factory):
    async def slow():
        await anyio.sleep(60)

    (late,) = await completions(factory, Scripted(lambda _turn, _text: slow()), episode_timeout_s=8.0)
    assert late.parts, late.failure
    assert not isinstance(merge_parts(late.parts), Measured)
    (completion,) = await completions(factory, ["[crane]"])
    assert merge_parts(completion.parts) == Measured(1.0)


async def test_a_run_trains_on_the_server(factory, project):  # noqa: F811
    def say(_text, nth):
        return ("[crane]", "[slate]")[nth % 2]

    trained = await train(project, factory.ref, say, args=factory.args, group_size=2, max_turns=3)
    assert trained.summary["groups_trained"] == 4, trained.summary
    assert trained.pushes == 5  # includes the first weights
