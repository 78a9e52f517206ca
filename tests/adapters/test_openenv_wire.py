"""OpenEnv's wire format against a scripted server, which sends real messages, and faults on request."""

import copy
import json

import anyio
import pytest
from aiohttp import web

from envs.adapters.openenv import OpenEnv, RewardedOpenEnv, openenv
from envs.contract import ToolError
from envs.factory import EnvironmentFactory
from envs.rewards.parts import merge_parts
from envs.snapshot import thaw
from stream.errors import EnvironmentFailure, ReferenceNotFoundError
from stream.validity import Measured, RewardReason, RolloutReason, Unmeasured
from tests.adapters.episodes import completions
from tests.cases.ports import free_port
from tests.unit.test_episode import call
from workers.engine_api.http_server import listen
from workers.rollout.environment_pool import EnvironmentPool

TOOLS = [{"name": "say", "description": "Say it.", "inputSchema": {"type": "object", "properties": {"reward": {}}}}]
ACTION = {"properties": {"metadata": {}, "move": {"type": "integer"}}, "required": ["move"], "title": "Move"}


def observation(text, reward, done=False):
    result = {"content": [{"type": "text", "text": text}], "data": text, "is_error": False}
    return {"observation": {"tool_name": "say", "result": result, "error": None}, "reward": reward, "done": done}


class Server:
    """A scripted environment: `say(reward=...)` has that reward; the name of a fault causes it."""

    def __init__(self, tools=TOOLS):
        self.tools, self.connections, self.steps = tools, 0, []
        self.released = anyio.Event()

    async def socket(self, request):
        stream = web.WebSocketResponse()
        await stream.prepare(request)
        self.connections += 1
        async for message in stream:
            answer = await self.answer(json.loads(message.data), stream)
            if answer is None:
                break
            await stream.send_str(answer if isinstance(answer, str) else json.dumps(answer))
        return stream

    async def answer(self, message, stream):
        if message["type"] == "close":
            return None
        if message["type"] == "mcp":
            result = {"result": {"tools": self.tools}} if self.tools else {"error": {"message": "no MCP"}}
            return {"type": "mcp", "data": {"jsonrpc": "2.0", "id": 1, **result}}
        if message["type"] == "reset":
            self.row = message["data"]
            if code := self.row.get("fault"):
                return {"type": "error", "data": {"message": "no such level", "code": code}}
            return {"type": "observation", "data": {"observation": {}, "reward": 0.0, "done": False}}
        self.steps.append(message["data"])
        arguments = message["data"].get("arguments", {})
        match arguments.get("fault"):
            case "late":
                await self.released.wait()
            case "close":
                return None
            case "junk":
                return "[1"
            case "raise":
                return {"type": "error", "data": {"message": "no more", "code": "EXECUTION_ERROR"}}
            case "invalid":
                return {"type": "error", "data": {"message": "Invalid message", "code": "VALIDATION_ERROR"}}
            case "error":
                error = {"error_type": "execution_error", "message": "that word is no word"}
                value = arguments.get("reward", 0)
                return {
                    "type": "observation",
                    "data": {"observation": {"result": None, "error": error}, "reward": value},
                }
        reward = arguments.get("reward")
        return {"type": "observation", "data": observation(f"said {reward}", reward, arguments.get("done", False))}

    async def schema(self, _):
        return web.json_response({"action": ACTION})

    def app(self):
        app = web.Application()
        app.router.add_get("/ws", self.socket)
        app.router.add_get("/schema", self.schema)
        return app


@pytest.fixture
async def server():
    server = Server()
    async with listen(server.app(), "127.0.0.1", 0) as url:
        server.url = url.replace("http", "ws")
        yield server


async def load(server, **args):
    return await anyio.to_thread.run_sync(EnvironmentFactory.load, f"openenv:{server.url}", args)


def say(**arguments):
    return call("say", json.dumps(arguments))


async def play(server, *turns, n=1, args=None, **more):
    found = await completions(await load(server, **args or {}), [*turns, "Done."], n=n, **more)
    return found[0]


async def test_the_model_gets_the_servers_tools(server):
    factory = await load(server)
    (tool,) = factory.tools
    assert (tool.name, tool.description) == ("say", "Say it.")
    assert factory.environment_class is RewardedOpenEnv


async def test_without_an_mcp_list_there_is_one_tool_with_the_actions_schema(server):
    server.tools = []
    factory = await load(server)
    (tool,) = factory.tools
    assert tool.schema["function"]["parameters"] == {
        "type": "object", "properties": {"move": {"type": "integer"}}, "required": ["move"]
    }  # fmt: skip
    await completions(factory, [call("step", '{"move": 3}'), "Done."])
    assert server.steps == [{"move": 3}]


@pytest.mark.parametrize(("reward", "total"), [("sum", 1.25), ("last", 0.25), ("max", 1.0)])
async def test_the_reward_is_the_sum_the_last_or_the_largest_of_the_steps(server, reward, total):
    completion = await play(server, say(reward=1.0), say(reward=0.25), args={"reward": reward, "no_step": "invalid"})
    assert merge_parts(completion.parts) == Measured(total)
    assert completion.messages[1]["content"] == "said 1.0"


async def test_one_step_without_a_reward_makes_the_sum_unmeasured(server):
    completion = await play(server, say(reward=1.0), say(reward=None), say(reward=1.0))
    (part,) = completion.parts
    assert part.reward.reason is RewardReason.MISSING
    assert "1 of 3 steps" in part.reward.detail


NOT_MEASURED = "no reward: the model took no step, and no_step is 'invalid'"


@pytest.mark.parametrize(
    "turns", [(), (say(fault="raise"), say(fault="invalid"))], ids=["no call", "illegal calls only"]
)
@pytest.mark.parametrize(
    ("args", "reward"),
    [
        ({}, Measured(0.0)),
        ({"no_step": -2}, Measured(-2.0)),
        ({"no_step": "invalid"}, Unmeasured(RewardReason.MISSING, NOT_MEASURED)),
        ({"reward": "last", "no_step": 0.5}, Measured(0.5)),
        ({"reward": "max", "no_step": "invalid"}, Unmeasured(RewardReason.MISSING, NOT_MEASURED)),
    ],
)
async def test_an_episode_without_a_step_is_worth_what_no_step_says(server, args, reward, turns):
    completion = await play(server, *turns, args=args)
    assert completion.failure is None
    assert completion.parts[0].reward == reward


async def test_an_unused_reward_may_be_missing(server):
    factory = await load(server, reward="none")
    assert factory.environment_class is OpenEnv
    (completion,) = await completions(factory, [say(reward=None), "Done."])
    assert (completion.failure, completion.parts) == (None, [])
    assert thaw(completion.snapshot, factory).calls[0]["arguments"] == {"reward": None}


async def test_the_episode_after_a_timed_out_call_reads_its_own_reward(server):
    """Upstream issue 1143: a client that keeps the socket reads each reply one request too late from then on."""
    factory = await load(server)
    async with EnvironmentPool({"it": factory}, size=1) as pool:
        late = await completions(factory, [say(fault="late", reward=0.111), "Done."], pool=pool, call_timeout_s=0.05)
        server.released.set()
        next_one = await completions(factory, [say(reward=0.999), "Done."], pool=pool)
    assert not isinstance(merge_parts(late[0].parts), Measured)
    assert merge_parts(next_one[0].parts) == Measured(0.999)


async def test_an_instance_reconnects_at_the_reset_after_a_cancelled_call(server):
    env = openenv(server.url)
    await env.reset()
    with anyio.move_on_after(0.05):
        await env.call_tool("say", {"fault": "late", "reward": 0.111})
    with pytest.raises(EnvironmentFailure, match="was closed in this episode"):
        env.get_reward()
    with pytest.raises(EnvironmentFailure, match="was closed in this episode"):
        await env.call_tool("say", {"reward": 1})
    server.released.set()
    await env.reset()
    await env.call_tool("say", {"reward": 0.999})
    assert env.get_reward() == 0.999
    assert server.connections == 2
    await env.close()


@pytest.mark.parametrize("fault", ["close", "junk"])
async def test_a_failing_server_invalidates_one_completion_and_the_next_one_reconnects(server, fault):
    factory = await load(server)
    before = server.connections
    async with EnvironmentPool({"it": factory}, size=1) as pool:
        (failed,) = await completions(factory, [say(reward=1), say(fault=fault), "Done."], pool=pool)
        (whole,) = await completions(factory, [say(reward=0.5), "Done."], pool=pool)
    assert failed.failure.reason is RolloutReason.ENV_STEP
    assert merge_parts(whole.parts) == Measured(0.5)
    assert server.connections == before + 2


@pytest.mark.parametrize(
    ("fault", "message"), [("error", "that word is no word"), ("invalid", "do not fit"), ("raise", "no more")]
)
async def test_the_model_reads_why_a_call_was_refused(server, fault, message):
    """The episode goes on, on the same connection: an illegal action is no way to an invalid completion."""
    factory = await load(server)
    before = server.connections
    (completion,) = await completions(factory, [say(fault=fault, reward=None), say(reward=1), "Done."])
    assert completion.failure is None
    assert message in completion.messages[1]["content"]
    assert completion.tool_errors == 1
    assert merge_parts(completion.parts) == Measured(1.0)
    assert server.connections == before + 1


@pytest.mark.parametrize("code", ["EXECUTION_ERROR", "VALIDATION_ERROR", "SESSION_ERROR"])
async def test_a_reset_that_the_server_refuses_is_not_the_models_fault(server, code):
    completion = await play(server, fields={"fault": code})
    assert completion.failure.reason is RolloutReason.ENV_RESET
    assert "no such level" in completion.failure.detail


async def test_the_server_gets_no_step_after_the_end(server):
    completion = await play(server, say(reward=1, done=True), say(reward=5))
    assert (completion.turns, completion.truncated) == (1, None)
    assert merge_parts(completion.parts) == Measured(1.0)
    env = openenv(server.url)
    await env.reset()
    await env.call_tool("say", {"reward": 1, "done": True})
    with pytest.raises(ToolError, match="the episode is over"):
        await env.call_tool("say", {"reward": 5})
    await env.close()


async def test_reset_gets_the_fields_that_json_can_hold_and_a_valid_seed(server):
    await play(server, fields={"level": 3, "junk": float("nan"), "seed": 2**40 + 5})
    assert server.row == {"level": 3, "completion_index": 0, "completion_seed": 0, "seed": 5}


async def test_a_copy_has_the_data_and_no_socket(server):
    env = openenv(server.url)
    await env.reset()
    await env.call_tool("say", {"reward": 1})
    kept = copy.copy(env)
    await env.reset()
    assert (kept.rewards, kept.get_reward(), env.rewards) == ([1], 1.0, [])
    with pytest.raises(EnvironmentFailure, match="never reset"):
        await kept.call_tool("say", {"reward": 2})
    await env.close()


async def test_a_missing_server_is_reported_with_address_and_start_command():
    port = free_port()
    with pytest.raises(ReferenceNotFoundError, match=rf"ws://127\.0\.0\.1:{port}.*uvicorn"):
        await anyio.to_thread.run_sync(EnvironmentFactory.load, f"openenv:ws://127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("ref", "args", "message"),
    [
        ("openenv:ftp://x", {}, "not the URL of an OpenEnv server"),
        ("openenv:ws://x", {"reward": "mean"}, "'sum', 'last', 'max' or 'none'"),
        ("openenv:ws://x", {"reward": "last"}, "reward = 'last' needs no_step"),
        ("openenv:ws://x", {"reward": "max"}, "reward = 'max' needs no_step"),
        ("openenv:ws://x", {"no_step": "zero"}, "no_step = 'zero'; it may be a finite number or 'invalid'"),
        ("openenv:ws://x", {"no_step": float("nan")}, "it may be a finite number or 'invalid'"),
        ("openenv:ws://x", {"reward": "none", "no_step": 0.0}, "no_step has no effect with reward = 'none'"),
        ("openenvy:ws://x", {}, "there is no adapter 'openenvy'; there are: openenv"),
    ],
)
def test_invalid_arguments_are_refused(ref, args, message):
    with pytest.raises(ReferenceNotFoundError, match=message):
        EnvironmentFactory.load(ref, args)
