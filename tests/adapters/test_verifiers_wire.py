"""The wire format of verifiers 0.4's environment servers, against a scripted server that sends the same frames."""

import json

import aiohttp
import anyio
import msgspec
import pytest
import zmq
import zmq.asyncio

from envs.adapters.verifiers import read_rewards
from envs.factory import EnvironmentFactory
from envs.rewards.parts import merge_parts
from envs.snapshot import thaw
from stream.errors import DataError, EngineError, EngineRefusedError
from stream.records import Prompt
from stream.validity import Measured, RewardReason, RolloutReason, TruncationReason
from tests.adapters.episodes import completions
from tests.unit.test_episode import END, Scripted, ids, make_chat, text_of
from tests.unit.test_recorder import recorder_of
from workers.rollout.agent_endpoint.endpoint import serve_endpoint
from workers.rollout.chat.chat_setup import ChatSetup
from workers.rollout.environment_pool import EnvironmentPool
from workers.rollout.group import GroupRunner
from workers.rollout.tool_formats import TOOL_FORMATS
from workers.settings import RolloutSettings

NODE = {"message": {"role": "assistant", "content": "x"}}
OK = {"ok": True, "is_timeout": False, "errors": []}


def reply(trace="t", nodes=1, **head):
    return {"success": True, "error": None, "head": OK | head, "traces": [{"id": trace, "nodes": nodes, "calls": 1}]}


def trace(**scalars):
    whole = {"ok": True, "is_timeout": False, "rewards": {"right": {"score": 1.0, "weight": 1.0}}, "metrics": {}}
    return {"nodes": [NODE], "calls": [{"error": None}], "errors": [], **whole, **scalars}


class Server:
    """A scripted server: `play(endpoint, task)` yields the frames of a run, each `(kind, payload)`."""

    def __init__(self, play):
        self.play = play
        self.cancelled, self.requests = [], []

    async def serve(self, *, task_status):
        socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        try:
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            task_status.started(f"tcp://127.0.0.1:{port}")
            async with anyio.create_task_group() as tasks:
                while True:
                    who, request, method, payload = await socket.recv_multipart()
                    tasks.start_soon(self.answer, socket, who, request, method, msgspec.msgpack.decode(payload))
        finally:
            socket.close(linger=0)

    async def answer(self, socket, who, request, method, payload):
        async def send(kind, data):
            await socket.send_multipart([who, request, kind, msgspec.msgpack.encode(data)])

        if method == b"health":
            await send(b"reply", {"success": True, "error": None})
        elif method == b"cancel":
            self.cancelled.append(payload["request_id"])
        else:
            self.requests.append((request.decode(), payload))
            async for kind, data in self.play(payload["client"]["base_url"], payload["task_data"]):
                await send(kind, data)


async def ask(endpoint, *messages, **more):
    """Make one request of an agent's program, as the OpenAI SDK does."""
    body = {"model": "policy", "messages": list(messages), **more}
    async with aiohttp.ClientSession() as session, session.post(f"{endpoint}/chat/completions", json=body) as response:
        text = await response.text()
        if response.status != 200:
            return response.status, text
        if more.get("stream"):
            chunks = [json.loads(line[6:]) for line in text.splitlines() if line[6:] not in ("", "[DONE]")]
            return response.status, chunks
        return response.status, json.loads(text)["choices"][0]["message"]


def user(text):
    return {"role": "user", "content": text}


async def played(play, script, **limits):
    """Return completions of one prompt on a server with this script."""
    server = Server(play)
    async with anyio.create_task_group() as tasks:
        address = await tasks.start(server.serve)
        factory = await anyio.to_thread.run_sync(EnvironmentFactory.load, f"verifiers:{address}")
        result = await completions(factory, script, fields={"answer": "4"}, **limits)
        if limits.get("episode_timeout_s"):
            with anyio.fail_after(5):
                while not server.cancelled:
                    await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()
    return result, server, factory


async def two_turns(endpoint, task):
    """Play a game of two turns, then send the rewards."""
    messages = [user("Guess.")]
    for feedback in ("Warmer.", None):
        _, answer = await ask(endpoint, *messages)
        messages += [answer, user(feedback)]
    yield b"delta", {"trace": "t", "open": {"id": "t"}, "nodes": [NODE, NODE], "calls": [{"error": None}] * 2}
    yield b"delta", {"trace": "t", "set": {"ok": True, "rewards": {"right": {"score": 0.5, "weight": 1.0}}}}
    yield b"delta", {"trace": "t", "set": {"rewards": {"right": {"score": 0.5, "weight": 2.0}}}, 7: "an int key"}
    yield b"reply", reply(nodes=2)


async def test_the_server_gives_the_reward_and_the_worker_the_tokens():
    (completion,), server, factory = await played(two_turns, ["one", "two"])
    assert completion.failure is None, completion.failure
    assert merge_parts(completion.parts) == Measured(1.0)
    assert completion.parts[0].name == "env.right"
    (row,) = completion.rows  # the second turn continues where the first one ended
    assert [row.tokens[a:b].tolist() for a, b in row.sampled_ranges] == [ids(f"one{END}"), ids(f"two{END}")]
    assert [(span.version, span.start, span.end) for span in row.spans] == [(7, *edge) for edge in row.sampled_ranges]
    assert [m["content"] for m in completion.messages] == ["one", "Warmer.", "two"]
    assert completion.prompt_messages == [user("Guess.")]
    _, request = server.requests[0]
    assert request["task_data"] == {"answer": "4", "prompt": [user("Go.")]}
    assert request["sampling"] == {"temperature": 1.0, "max_tokens": 5000}
    assert thaw(completion.snapshot, factory).rewards == {"right": 1.0}


def playing(*turns, **last):
    async def play(endpoint, task):
        for messages in turns:
            await ask(endpoint, *messages)
        yield b"delta", {"trace": "t", "open": {"id": "t"}, "nodes": [NODE], "calls": [{"error": None}]}
        yield b"delta", {"trace": "t", "set": trace(**last)}
        yield b"reply", reply()

    return play


async def test_rewritten_history_starts_a_new_row_with_the_exact_context():
    turns = [[user("a")], [user("another"), {"role": "assistant", "content": "compacted"}, user("b")]]
    (completion,), _, _ = await played(playing(*turns), ["one", "two"])
    first, second = completion.rows
    assert first.tokens.tolist() == ids(f"one{END}")
    assert "compacted" in text_of(second.prompt)
    assert "compacted" not in text_of(first.prompt)
    assert second.tokens.tolist() == ids(f"two{END}")


async def test_an_episode_without_a_model_turn_is_invalid():
    (completion,), _, _ = await played(playing(), [])
    assert completion.failure.reason is RolloutReason.ENV_STEP
    assert "without a turn" in completion.failure.detail


async def test_an_engine_that_fails_is_not_scored():
    (completion,), _, _ = await played(playing([user("a")]), [EngineError("out of order")])
    assert completion.failure.reason is RolloutReason.ENGINE


async def test_a_first_prompt_that_is_too_long_is_not_scored():
    refused = EngineRefusedError("the maximum context length is 5")
    (completion,), _, _ = await played(playing([user("a")]), [refused])
    assert completion.failure.reason is RolloutReason.PROMPT_TOO_LONG


async def test_a_refusal_of_the_server_makes_the_completion_invalid():
    async def play(endpoint, task):
        yield b"reply", {"success": False, "error": "ValueError: no such task"}

    (completion,), _, _ = await played(play, [])
    assert completion.failure.reason is RolloutReason.ENV_STEP
    assert "no such task" in completion.failure.detail


async def test_an_episode_past_its_deadline_is_cancelled_at_the_server():
    async def play(endpoint, task):
        await ask(endpoint, user("a"))
        await anyio.sleep(60)
        yield b"reply", reply()

    (completion,), server, _ = await played(play, ["one"], episode_timeout_s=0.5)
    assert server.cancelled == [server.requests[0][0]]
    assert completion.truncated is TruncationReason.TOOL_TIME
    assert merge_parts(completion.parts).reason is RewardReason.MISSING


async def test_beyond_the_turn_limit_answers_are_empty_so_that_the_program_can_end():
    answers = []

    async def play(endpoint, task):
        messages = [user("a")]
        for _ in range(8):
            status, message = await ask(endpoint, *messages)
            answers.append(message["content"] if status == 200 else status)
            messages += [message if status == 200 else user("?"), user("on")]
        yield b"delta", {"trace": "t", "nodes": [NODE], "calls": [{"error": None}], "set": trace()}
        yield b"reply", reply()

    (completion,), _, _ = await played(play, ["x"] * 8, max_turns=2)
    assert answers == ["x", "x", "", "", "", 400, 400, 400]
    assert (completion.turns, completion.truncated) == (2, TruncationReason.MAX_TURNS)
    assert merge_parts(completion.parts) == Measured(1.0)


async def test_tool_calls_reach_the_program_and_their_results_continue_the_row():
    tools = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}]
    seen = []

    async def play(endpoint, task):
        _, chunks = await ask(endpoint, user("a"), tools=tools, stream=True, stream_options={"include_usage": True})
        seen.extend(chunks)
        (call,) = chunks[1]["choices"][0]["delta"]["tool_calls"]
        call = {name: value for name, value in call.items() if name != "index"}
        asked = {"role": "assistant", "content": None, "tool_calls": [call]}
        await ask(endpoint, user("a"), asked, {"role": "tool", "tool_call_id": call["id"], "content": "3"}, tools=tools)
        yield b"delta", {"trace": "t", "nodes": [NODE], "calls": [{"error": None}], "set": trace()}
        yield b"reply", reply()

    script = ['<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "3"]
    (completion,), _, _ = await played(play, script)
    assert seen[1]["choices"][0]["delta"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert seen[2]["choices"][0]["finish_reason"] == "tool_calls"
    assert seen[3]["usage"]["completion_tokens"] == len(ids(script[0] + END))
    assert len(completion.rows) == 1
    assert completion.tool_calls == 1
    assert [m["role"] for m in completion.messages] == ["assistant", "tool", "assistant"]


async def test_a_repeated_request_gets_the_same_answer_without_sampling_again():
    async def play(endpoint, task):
        first = await ask(endpoint, user("a"))
        body = {"model": "policy", "messages": [user("a")]}
        retry = {"x-stainless-retry-count": "1"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{endpoint}/chat/completions", json=body, headers=retry) as response,
        ):
            assert (await response.json())["choices"][0]["message"] == first[1]
        yield b"delta", {"trace": "t", "nodes": [NODE], "calls": [{"error": None}], "set": trace()}
        yield b"reply", reply()

    (completion,), _, _ = await played(play, Scripted(lambda _turn, _text: "one"))
    assert completion.failure is None
    assert (completion.turns, len(completion.rows)) == (1, 1)


async def test_an_episodes_address_is_secret_and_ends_with_it():
    recorder, completion = recorder_of(Scripted(["one"]))
    async with serve_endpoint("127.0.0.1") as endpoint:
        async with endpoint.episode(recorder) as url:
            assert (await ask(url.replace("/v1", "x/v1"), user("a")))[0] == 400
            assert (await ask(url, user("a")))[1]["content"] == "one"
        assert (await ask(url, user("a")))[0] == 400
    assert completion.turns == 1


async def test_a_request_without_a_conversation_is_refused():
    recorder, _ = recorder_of(Scripted([]))
    async with serve_endpoint("127.0.0.1") as endpoint, endpoint.episode(recorder) as url:
        assert (await ask(url))[0] == 400
        assert (await ask(url, {"role": "assistant", "tool_calls": [{"id": "1"}]}))[0] == 400


async def test_an_agent_environment_without_an_endpoint_is_refused():
    factory = await anyio.to_thread.run_sync(EnvironmentFactory.load, "verifiers:tcp://127.0.0.1:9")
    prompt = Prompt(id="p", messages=[user("Go.")], environment="it")
    async with EnvironmentPool({"it": factory}, size=1) as pool:
        with pytest.raises(DataError, match="no endpoint is served here"):
            await GroupRunner(
                chats={prompt.environment: ChatSetup(make_chat(), TOOL_FORMATS["hermes"])},
                sampler=Scripted([]),
                pool=pool,
                limits=RolloutSettings(),
            ).run(prompt)


async def test_a_missing_server_fails_the_reset():
    factory = await anyio.to_thread.run_sync(
        EnvironmentFactory.load, "verifiers:tcp://127.0.0.1:9", {"health_timeout_s": 0.2}
    )
    (completion,) = await completions(factory, [])
    assert completion.failure.reason is RolloutReason.ENV_RESET
    assert "tcp://127.0.0.1:9" in completion.failure.detail


@pytest.mark.parametrize(
    ("last", "traces", "reason"),
    [
        (reply(ok=False), [trace()], RewardReason.RAISED),
        (reply(), [trace(ok=False, errors=[{"type": "ProviderError", "message": "502"}])], RewardReason.RAISED),
        (reply(is_timeout=True), [trace()], RewardReason.TIMEOUT),
        (reply(), [trace(is_timeout=True, rewards={"right": {"score": 0.0, "weight": 1.0}})], RewardReason.TIMEOUT),
        (reply(), [trace(calls=[])], RewardReason.RAISED),
        (reply(), [trace(calls=[{"error": {"type": "ProviderError"}}])], RewardReason.RAISED),
        (reply(), [trace(rewards={})], RewardReason.MISSING),
        (reply(), [trace(rewards={"right": None})], RewardReason.MISSING),
        (reply(), [trace(rewards={"right": {"score": float("nan"), "weight": 1.0}})], RewardReason.NOT_FINITE),
        (reply(nodes=2), [trace()], RewardReason.RAISED),
        (reply(), [], RewardReason.RAISED),
        (reply(), [trace(), trace()], RewardReason.RAISED),
    ],
    ids=[
        "episode not ok", "trace not ok", "episode timed out", "scoring timed out: ok, reward 0", "no turn: ok",
        "no turn that worked", "no reward", "a reward that is None", "NaN", "a delta was lost", "no trace",
        "two agents",
    ],
)  # fmt: skip
def test_a_reward_counts_only_in_a_complete_valid_reply(last, traces, reason):
    (reward,) = read_rewards(last, traces).values()
    assert reward.reason is reason


def test_rewards_are_weighted_and_one_unmeasured_part_leaves_the_sum_unmeasured():
    rewards = {"right": {"score": 1.0, "weight": 2.0}, "short": {"score": 0.5, "weight": 0.0}, "lost": None}
    result = read_rewards(reply(), [trace(rewards=rewards)])
    assert (result["right"], result["short"]) == (Measured(2.0), Measured(0.0))
    assert result["lost"].reason is RewardReason.MISSING
