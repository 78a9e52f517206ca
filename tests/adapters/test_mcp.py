"""MCP servers written with the official SDK, as processes: over stdio, and over streamable HTTP."""

import json
import signal
import sys
from functools import partial

import anyio
import pytest

from envs.contract import ToolError, is_content_parts
from envs.factory import EnvironmentFactory
from envs.rewards import RewardBatch, RewardFunction
from envs.snapshot import thaw
from stream.errors import EnvironmentFailure, ReferenceNotFoundError
from stream.records import Group, Prompt
from stream.validity import Measured, RolloutReason
from tests.adapters.episodes import completions, train
from tests.adapters.servers import HERE, serving
from tests.cases.ports import free_port
from tests.e2e.conftest import project, random_model  # noqa: F401  (fixtures)
from tests.unit.test_episode import call
from workers.rollout.environment_pool import EnvironmentPool

SERVER = HERE / "mcp" / "notes_server.py"
STDIO = {"command": sys.executable, "args": [str(SERVER)]}


@pytest.fixture(scope="module")
def stdio():
    """Return a factory whose environments start the server themselves."""
    return EnvironmentFactory.load("mcp", STDIO)


def write(text, **more):
    return call("write", json.dumps({"text": text, **more}))


@pytest.mark.full
def test_the_model_gets_the_servers_tools(stdio):
    shown = {tool.name: tool.schema["function"] for tool in stdio.tools}
    assert list(shown) == ["write", "read", "refuse", "lie", "wait", "attach", "crash"]
    assert shown["write"]["description"].startswith("Write a note.")
    properties = shown["write"]["parameters"]["properties"]
    assert (properties["text"]["type"], properties["times"]["default"]) == ("string", 1)
    assert shown["write"]["parameters"]["required"] == ["text"]
    assert not stdio.has_reward


@pytest.mark.full
async def test_the_model_reads_results_and_tool_errors(stdio):
    says = [write("a", times=2), call("read", '{"number": 9}'), call("read", "{}"), "Done."]
    (completion,) = await completions(stdio, says)
    answers = [message["content"] for message in completion.messages if message["role"] == "tool"]
    assert answers[0] == "2 notes"
    assert answers[1].startswith("Error: ToolError: Error executing tool read")
    assert "number" in answers[2]
    assert (completion.failure, completion.tool_errors) == (None, 2)


@pytest.mark.full
async def test_a_reward_function_reads_the_calls_from_the_snapshot(stdio):
    (completion,) = await completions(stdio, [write("a", times=2), "Done."])
    kept = thaw(completion.snapshot, stdio)
    assert kept.calls == [
        {"tool": "write", "arguments": {"text": "a", "times": 2}, "text": "2 notes", "is_error": False}
    ]

    def notes(environments, **_):
        return [float(env.calls[-1]["text"].split()[0]) for env in environments]

    group = Group(prompt=Prompt(id="p", messages=[]), completions=[completion])
    assert await RewardFunction(notes, "notes")(RewardBatch.from_group(group, [kept]), 10) == [Measured(2.0)]


@pytest.mark.full
async def test_a_dead_server_makes_the_completion_invalid_and_the_next_episode_has_a_new_session(stdio):
    async with EnvironmentPool({"it": stdio}, size=1) as pool:
        (failed,) = await completions(stdio, [write("a"), call("crash"), "Done."], pool=pool)
        (whole,) = await completions(stdio, [write("b"), "Done."], pool=pool)
    assert failed.failure.reason is RolloutReason.ENV_STEP
    assert "Connection closed" in failed.failure.detail
    assert whole.failure is None
    assert whole.messages[1]["content"] == "1 notes"


def test_any_error_after_which_the_server_still_works_is_text_for_the_model(stdio):
    env = stdio.make()
    env.reset()
    for code in [-32000, -32001, -32600, -32601, -32602, -32603, -32700, -1, 0, 1, 408, 500]:
        with pytest.raises(ToolError, match=f"refused with {code}"):
            env.call_tool("refuse", {"code": code})
        assert env.calls[-1]["is_error"]
    with pytest.raises(ToolError, match="lie"):  # the SDK refuses the answer
        env.call_tool("lie", {})
    assert env.call_tool("write", {"text": "a"}) == "1 notes"
    env.close()


@pytest.mark.parametrize(("blocking", "notes"), [(False, "2 notes"), (True, "1 notes")])
def test_a_tool_past_its_deadline_is_text_for_the_model(blocking, notes):
    """A server that answers nothing else meanwhile is left, and a new session shows that it works."""
    env = EnvironmentFactory.load("mcp", STDIO | {"timeout_s": 5.0}).make()
    env.reset()
    env.call_tool("write", {"text": "a"})
    with pytest.raises(ToolError, match="wait did not answer within 5 s"):
        env.call_tool("wait", {"seconds": 60, "blocking": blocking})
    assert env.call_tool("write", {"text": "a"}) == notes
    env.close()


async def test_a_server_that_is_gone_after_a_deadline_makes_the_completion_invalid(tmp_path):
    port = free_port()
    with serving([sys.executable, SERVER, str(port)], port, tmp_path) as server:
        url = f"http://127.0.0.1:{port}/mcp"
        factory = await anyio.to_thread.run_sync(partial(EnvironmentFactory.load, "mcp", {"url": url, "timeout_s": 2}))
        env = factory.make()
        await anyio.to_thread.run_sync(env.reset)
        server.send_signal(signal.SIGSTOP)
        with pytest.raises(EnvironmentFailure, match="did not answer within 2 s"):
            await anyio.to_thread.run_sync(env.call_tool, "write", {"text": "a"})
        server.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("images", [False, True])
def test_embedded_resources_are_given_as_text_or_image(images):
    env = EnvironmentFactory.load("mcp", STDIO | {"images": images}).make()
    env.reset()
    found = env.call_tool("attach", {})
    rest = ["(application/pdf, 5 bytes, note://3)", "(audio/wav, 5 bytes)", "note://4 fourth: the last one"]
    if not images:
        assert found.splitlines() == [
            *("here:", "a note", "(image/png, 5 bytes, note://2)", rest[0], "(image/jpeg, 5 bytes)", *rest[1:])
        ]
    else:
        pictures = [
            {"type": "image_url", "image_url": {"url": f"data:{kind};base64,MTIzNDU="}}
            for kind in ("image/png", "image/jpeg")
        ]
        texts = ["here:\na note", rest[0], "\n".join(rest[1:])]
        shown = [{"type": "text", "text": text} for text in texts]
        assert found == [shown[0], pictures[0], shown[1], pictures[1], shown[2]]
        assert is_content_parts(found)
    env.close()


def test_the_same_instance_opens_a_new_session_after_a_failure(stdio):
    env = stdio.make()
    env.reset()
    with pytest.raises(EnvironmentFailure):
        env.call_tool("crash", {})
    with pytest.raises(EnvironmentFailure, match="lost in this episode"):
        env.call_tool("write", {"text": "a"})
    env.reset()
    assert env.call_tool("write", {"text": "a"}) == "1 notes"
    env.close()


@pytest.mark.full
def test_fresh_opens_a_new_session_for_each_episode():
    kept, fresh = (EnvironmentFactory.load("mcp", STDIO | {"fresh": fresh}).make() for fresh in (False, True))
    counts = []
    for env in (kept, fresh):
        for _ in range(2):
            env.reset()
            counts.append(env.call_tool("write", {"text": "a"}))
        env.close()
    assert counts == ["1 notes", "2 notes", "1 notes", "1 notes"]


@pytest.mark.full
@pytest.mark.timeout(400)
async def test_a_run_trains_on_a_stdio_server(project):  # noqa: F811
    (project.folder / "notes.py").write_text(
        "def notes(environments, **columns):\n"
        "    return [float(env.calls[-1]['text'].split()[0]) for env in environments]\n"
    )

    def say(text, nth):
        return "Done." if "<tool_response>" in text else write("a", times=nth + 1)

    reward = f"{project.folder}/notes.py:notes"
    trained = await train(project, "mcp", say, args=STDIO | {"fresh": True}, reward=reward)
    assert (trained.summary["groups_trained"], trained.summary["dead"]) == (4, 0), trained.summary
    assert trained.pushes == 5  # includes the first weights
    for step in trained.metrics:  # one session for all episodes would accumulate notes from group to group
        assert (step["reward/min"], step["reward/mean"], step["reward/max"]) == (1.0, 2.5, 4.0)


@pytest.mark.full
async def test_an_episode_runs_over_streamable_http(tmp_path):
    port = free_port()
    with serving([sys.executable, SERVER, str(port)], port, tmp_path) as server:
        factory = await anyio.to_thread.run_sync(partial(EnvironmentFactory.load, f"mcp:http://127.0.0.1:{port}/mcp"))
        result = await completions(factory, [write("a"), "Done."], n=3)
        assert sorted(each.messages[1]["content"] for each in result) == ["1 notes", "2 notes", "3 notes"]
        server.kill()
        server.wait()
        (failed,) = await completions(factory, [write("a"), "Done."])
    assert failed.failure.reason in (RolloutReason.ENV_RESET, RolloutReason.ENV_STEP)


@pytest.mark.parametrize(
    ("ref", "args", "message"),
    [
        ("mcp:http://127.0.0.1:9/mcp", {}, "no MCP server answers at 'http://127.0.0.1:9/mcp'"),
        ("mcp", {"command": "there-is-no-such-command"}, "no MCP server answers at 'there-is-no-such-command'"),
        ("mcp", {}, "give one of them"),
    ],
)
def test_a_missing_server_is_an_error_at_start(ref, args, message):
    with pytest.raises(ReferenceNotFoundError, match=message):
        EnvironmentFactory.load(ref, args)
