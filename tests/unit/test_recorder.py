"""The recorder samples and records the turns that an agent requests, and adds none after the episode's end."""

import json

import anyio
import msgspec
import pytest

from stream.errors import EngineRefusedError
from stream.records import Completion, Prompt
from stream.validity import RolloutReason
from tests.cases.families import template_of
from tests.unit.test_episode import Scripted, make_chat
from workers.rollout.agent_endpoint.dialects.openai_chat import OpenAIChat, parse_messages, to_openai_message
from workers.rollout.agent_endpoint.neutral import RequestRefusedError
from workers.rollout.agent_endpoint.recorder import Recorder
from workers.rollout.episode import EpisodeContext
from workers.rollout.episode_clock import EpisodeClock
from workers.rollout.tool_formats import TOOL_FORMATS
from workers.settings import AgentSettings, RolloutSettings

ADD = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def user(text):
    return {"role": "user", "content": text}


def recorder_of(sampler, chat=None, agents=AgentSettings(), **limits):  # noqa: B008  (frozen)
    """Make a recorder of a new episode, and the completion that it fills."""
    completion = Completion(index=0, seconds={"engine": 0.0})
    context = EpisodeContext(
        prompt=Prompt(id="p", messages=[user("a")]),
        index=0,
        chat=chat or make_chat(),
        tool_format=TOOL_FORMATS["hermes"],
        sampler=sampler,
        slot=None,
        limits=RolloutSettings(**limits),
        agents=agents,
    )
    return Recorder(context, completion, EpisodeClock(60.0)), completion


async def ask(recorder, body):
    """Ask for a turn as a program of OpenAI's chat completions does; returns the message."""
    return to_openai_message((await recorder.complete(OpenAIChat().parse(body, {}))).message)


@pytest.mark.parametrize("argument", [str(10**40), "[" * 120 + "]" * 120], ids=["huge", "nested"])
async def test_a_call_that_a_record_cannot_hold_is_recorded_as_text_and_the_row_continues(argument):
    call = '<tool_call>{"name": "add", "arguments": {"a": ' + argument + "}}</tool_call>"
    recorder, completion = recorder_of(Scripted([call, "done"]))
    reply = await ask(recorder, {"messages": [user("a")], "tools": ADD})
    assert json.loads(reply["tool_calls"][0]["function"]["arguments"]) == {"a": json.loads(argument)}
    answer = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "3"}
    await ask(recorder, {"messages": [user("a"), reply, answer], "tools": ADD})
    assert len(recorder.record()[0]) == 1
    assert parse_messages([reply])[0]["tool_calls"] == completion.messages[0]["tool_calls"]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(completion), type=Completion) == completion


async def test_a_request_that_a_record_cannot_hold_is_refused():
    recorder, _ = recorder_of(Scripted(["one"]))
    with pytest.raises(EngineRefusedError, match="a record cannot hold"):
        await ask(recorder, {"messages": [user("a")], "tools": [ADD[0] | {"huge": 10**40}]})


async def test_closing_the_recorder_cancels_the_running_turn_and_refuses_the_next():
    class Slow(Scripted):
        async def sample(self, prompt_ids, options, *, min_policy_version=0):
            asked.set()
            await anyio.sleep_forever()

    asked, refused = anyio.Event(), []
    recorder, completion = recorder_of(Slow([]))

    async def one():
        try:
            await ask(recorder, {"messages": [user("a")]})
        except EngineRefusedError as error:
            refused.append(str(error))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one)
        tasks.start_soon(one)
        await asked.wait()
        recorder.close()
    assert refused == ["the episode is over"] * 2
    with pytest.raises(EngineRefusedError, match="the episode is over"), anyio.fail_after(5):
        await ask(recorder, {"messages": [user("b")]})
    assert (completion.turns, completion.messages, recorder.record()[0]) == (0, [], [])


@pytest.mark.parametrize(("role", "rows"), [("user", 2), ("tool", 1)])
async def test_a_row_ends_where_the_template_drops_reasoning_before_a_user_message(role, rows):
    sampler = Scripted(["<think>\nHm.\n</think>\n\nOne.", "Two."])
    recorder, _ = recorder_of(sampler, make_chat(template_of("qwen3")))
    reply = await ask(recorder, {"messages": [user("a")]})
    await ask(recorder, {"messages": [user("a"), reply, {"role": role, "content": "b"}]})
    assert len(recorder.record()[0]) == rows


async def test_a_refused_request_makes_the_episode_invalid_if_it_was_the_last():
    recorder, _ = recorder_of(Scripted(["one", "two"]))
    await ask(recorder, {"messages": [user("a")]})
    with pytest.raises(RequestRefusedError):
        await ask(recorder, {"messages": [user("b")], "tools": [ADD[0] | {"huge": 10**40}]})
    failure = recorder.end()
    assert failure.reason is RolloutReason.ENV_STEP
    assert failure.detail.startswith("a request was refused: the request holds values that a record cannot hold")
    await ask(recorder, {"messages": [user("c")]})
    assert recorder.end() is None
