"""What an episode that leads itself says and hears: kept readable, and nothing added once it is over."""

import json

import anyio
import msgspec
import pytest

from stream.errors import EngineRefusedError
from stream.records import Completion
from tests.unit.test_episode import Scripted, make_chat
from workers.rollout.agent_endpoint.openai_messages import parse_messages, to_openai_message
from workers.rollout.agent_endpoint.recorder import ChatsByTools, Recorder
from workers.rollout.tool_formats.detection import TOOL_FORMATS
from workers.settings import Rollout

ADD = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def user(text):
    return {"role": "user", "content": text}


def recorder_of(sampler):
    completion = Completion(index=0, seconds={"engine": 0.0})
    return Recorder(completion, ChatsByTools(make_chat()), sampler, Rollout(), TOOL_FORMATS["hermes"], 0)


@pytest.mark.parametrize("argument", [str(10**40), "[" * 120 + "]" * 120], ids=["huge", "nested"])
async def test_a_call_that_no_record_can_hold_is_kept_as_text_and_the_line_of_conversation_goes_on(argument):
    call = '<tool_call>{"name": "add", "arguments": {"a": ' + argument + "}}</tool_call>"
    recorder = recorder_of(Scripted([call, "done"]))
    said = await recorder.complete({"messages": [user("a")], "tools": ADD})
    told = to_openai_message(said)
    assert json.loads(told["tool_calls"][0]["function"]["arguments"]) == {"a": json.loads(argument)}
    answer = {"role": "tool", "tool_call_id": told["tool_calls"][0]["id"], "content": "3"}
    await recorder.complete({"messages": [user("a"), told, answer], "tools": ADD})
    assert len(recorder.rows()) == 1
    assert parse_messages([told])[0]["tool_calls"] == recorder.completion.messages[0]["tool_calls"]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(recorder.completion), type=Completion) == recorder.completion


async def test_a_request_that_no_record_can_hold_is_refused():
    recorder = recorder_of(Scripted(["one"]))
    with pytest.raises(EngineRefusedError, match="no record"):
        await recorder.complete({"messages": [user("a")], "tools": [{"huge": 10**40}]})


async def test_a_turn_under_way_when_the_episode_is_over_is_given_up_and_none_comes_after_it():
    class Slow(Scripted):
        async def sample(self, prompt_ids, sampling, *, min_policy_version=0):
            asked.set()
            await anyio.sleep_forever()

    asked, refused = anyio.Event(), []
    recorder = recorder_of(Slow([]))

    async def ask():
        try:
            await recorder.complete({"messages": [user("a")]})
        except EngineRefusedError as error:
            refused.append(str(error))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        tasks.start_soon(ask)
        await asked.wait()
        recorder.close()
    assert refused == ["the episode is over"] * 2
    assert (recorder.completion.turns, recorder.completion.messages, recorder.rows()) == (0, [], [])
