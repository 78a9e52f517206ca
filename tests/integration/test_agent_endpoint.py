"""Clients of OpenAI and Anthropic ask an episode's endpoint for turns; what they read is what was sampled."""

from contextlib import asynccontextmanager

import aiohttp
import anthropic
import anyio
import openai
import pytest

from stream.errors import EngineRefusedError, EngineUnavailableError
from stream.validity import RolloutReason, TruncationReason
from tests.cases.agent_requests import recorded
from tests.cases.families import template_of
from tests.unit.test_episode import Scripted, call, make_chat
from tests.unit.test_recorder import recorder_of
from workers.rollout.agent_endpoint import answers as answers_module
from workers.rollout.agent_endpoint import endpoint as endpoint_module
from workers.rollout.agent_endpoint.endpoint import serve_endpoint

LIST = call("run", '{"command": "ls"}')
SAYS = [f"<think>\nHm.\n</think>\n\nI look.\n{LIST}", "Done."]
CHAT_TOOL = {"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}}
FLAT_TOOL = {"type": "function", "name": "run", "parameters": {"type": "object", "properties": {}}, "strict": False}
ANTHROPIC_TOOL = {"name": "run", "input_schema": {"type": "object", "properties": {}}}
USER = {"role": "user", "content": "List."}


class Served:
    """An episode's endpoint and clients of it."""

    def __init__(self, url, key, recorder, completion, sampler):
        self.url, self.key = url, key
        self.recorder, self.completion, self.sampler = recorder, completion, sampler
        self.openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
        self.anthropic = anthropic.AsyncAnthropic(base_url=url, auth_token=key, api_key=None, max_retries=0)


@asynccontextmanager
async def served(script, template="qwen3", **limits):
    sampler = script if hasattr(script, "sample") else Scripted(script)
    recorder, completion = recorder_of(sampler, make_chat(template_of(template)), **{"max_tokens": 50_000, **limits})
    async with serve_endpoint("127.0.0.1") as endpoint, endpoint.episode(recorder) as url:
        key = url.removesuffix("/v1").rpartition("/")[2]
        clients = Served(endpoint.url, key, recorder, completion, sampler)
        async with clients.openai, clients.anthropic:
            yield clients


async def by_chat(its, *, streams):
    """Two turns with a call by chat completions; returns the text of the last one."""
    messages = [USER]
    for _ in range(2):
        asked = {"model": "policy", "messages": messages, "tools": [CHAT_TOOL]}
        if streams:
            async with its.openai.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
                answer = await stream.get_final_completion()
        else:
            answer = await its.openai.chat.completions.create(**asked)
        (choice,) = answer.choices
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        messages.append(choice.message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
        for made in choice.message.tool_calls or ():
            assert (made.function.name, made.function.arguments) == ("run", '{"command": "ls"}')
            assert choice.finish_reason == "tool_calls"
            messages.append({"role": "tool", "tool_call_id": made.id, "content": "a.txt"})
    return choice.message.content, answer.usage.prompt_tokens_details.cached_tokens


async def by_responses(its, *, streams):
    """The same by Responses."""
    items = [USER]
    for _ in range(2):
        asked = {"model": "policy", "input": items, "tools": [FLAT_TOOL]}
        if streams:
            async with its.openai.responses.stream(**asked) as stream:
                kinds = [each.type async for each in stream]
                assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
                answer = await stream.get_final_response()
        else:
            answer = await its.openai.responses.create(**asked)
        assert answer.status == "completed"
        items = [*items, *(item.model_dump(exclude_none=True) for item in answer.output)]
        for item in answer.output:
            if item.type == "reasoning":
                assert item.content[0].text == "Hm."
            if item.type == "function_call":
                assert (item.name, item.arguments) == ("run", '{"command": "ls"}')
                items.append({"type": "function_call_output", "call_id": item.call_id, "output": "a.txt"})
    return answer.output_text, answer.usage.input_tokens_details.cached_tokens


async def by_messages(its, *, streams):
    """The same by Anthropic's Messages."""
    messages = [USER]
    for _ in range(2):
        asked = {"model": "policy", "max_tokens": 1000, "messages": messages, "tools": [ANTHROPIC_TOOL]}
        if streams:
            async with its.anthropic.messages.stream(**asked) as stream:
                kinds = [each.type async for each in stream]
                answer = await stream.get_final_message()
            assert kinds[0] == "message_start"
            assert kinds[-1] == "message_stop"
        else:
            answer = await its.anthropic.messages.create(**asked)
        messages = [*messages, {"role": "assistant", "content": [block.model_dump() for block in answer.content]}]
        results = []
        for block in answer.content:
            if block.type == "thinking":
                assert block.thinking == "Hm."
            if block.type == "tool_use":
                assert (block.name, block.input) == ("run", {"command": "ls"})
                assert answer.stop_reason == "tool_use"
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": "a.txt"})
        messages.append({"role": "user", "content": results})
    return answer.content[0].text, answer.usage.cache_read_input_tokens


WAYS = [by_chat, by_responses, by_messages]


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("way", WAYS)
async def test_an_episode_by_a_vendors_client_is_one_row_of_what_was_sampled(way, streams):
    async with served(SAYS) as its:
        said, cached = await way(its, streams=streams)
        (row,) = its.recorder.record()[0]
    assert said == "Done."
    (first, *_), (second, *_) = its.sampler.asked
    assert list(row.prompt) == first
    assert [*row.prompt, *row.tokens][: len(second)] == second
    assert cached == len(row.prompt) + row.sampled_ranges[0][1]
    assert its.completion.tool_calls == 1
    assert its.recorder.end() is None


@pytest.mark.parametrize("way", WAYS)
async def test_all_dialects_ask_the_engine_for_the_same(way):
    async with served(SAYS) as its:
        await way(its, streams=False)
    async with served(SAYS) as other:
        await by_chat(other, streams=True)
    assert [asked for asked, *_ in its.sampler.asked] == [asked for asked, *_ in other.sampler.asked]


async def test_tokens_are_counted_as_they_are_sampled_and_nothing_is_recorded():
    asked = {"model": "policy", "messages": [USER], "tools": [ANTHROPIC_TOOL], "system": "You list."}
    async with served(["Done."]) as its:
        counted = await its.anthropic.messages.count_tokens(**asked)
        assert its.recorder.record()[0] == []
        answer = await its.anthropic.messages.create(max_tokens=100, **asked)
    assert counted.input_tokens == answer.usage.input_tokens == len(its.sampler.asked[0][0])


@pytest.mark.parametrize("text", ["I look.\n", ""], ids=["text", "no text"])
async def test_a_chat_client_that_takes_the_reasoning_out_of_the_content_continues_its_row(text):
    async with served([f"<think>\nHm.\n</think>\n\n{text}{LIST}", "Done."]) as its:
        asked = {"model": "policy", "tools": [CHAT_TOOL]}
        answer = await its.openai.chat.completions.create(messages=[USER], **asked)
        message = answer.choices[0].message
        before, _, after = message.content.partition("</think>")  # as LiteLLM does
        kept = message.model_dump(include={"role", "tool_calls"}, exclude_none=True)
        kept |= {"reasoning_content": before.removeprefix("<think>"), "content": after or None}
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "a.txt"}
        await its.openai.chat.completions.create(messages=[USER, kept, result], **asked)
        (row,) = its.recorder.record()[0]
    assert len(row.sampled_ranges) == 2


async def test_the_list_of_models_has_the_length_of_the_context_if_it_is_known():
    recorder, _ = recorder_of(Scripted([]))
    async with serve_endpoint("127.0.0.1") as endpoint, aiohttp.ClientSession() as session:
        for length, expected in ((4096, {4096}), (0, set())):
            async with endpoint.episode(recorder, length) as url, session.get(f"{url}/models") as answer:
                (model,) = (await answer.json())["data"]
            known = {"context_length", "max_model_len", "max_input_tokens"} & set(model)
            assert {model[name] for name in known} == expected


async def test_claude_codes_first_request_is_answered():
    request, _ = recorded("claude-code-turns")
    async with served([LIST]) as its, aiohttp.ClientSession() as session:
        headers = {"Authorization": f"Bearer {its.key}"}
        async with session.post(f"{its.url}/v1/messages?beta=true", json=request.body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            assert answer.content_type == "text/event-stream"
            assert (await answer.text()).count("event: content_block_start") == 1


async def test_a_key_is_taken_from_each_place_and_another_one_is_told_that_the_episode_is_over():
    async with served(["one"] * 9) as its, aiohttp.ClientSession() as session:
        body = {"messages": [USER]}
        for path, headers, status in (
            (f"/{its.key}/v1/chat/completions", {}, 200),
            ("/v1/chat/completions", {"Authorization": f"Bearer {its.key}"}, 200),
            ("/v1/messages", {"x-api-key": its.key}, 200),
            ("/v1/messages", {"x-api-key": "other"}, 400),
            ("/v1/responses", {}, 400),
            ("/other/v1/chat/completions", {}, 400),
        ):
            async with session.post(its.url + path, json=body, headers=headers) as answer:
                assert answer.status == status, (path, await answer.text())
                if status == 400:
                    assert "the episode is over" in await answer.text()


def refusing(message):
    async def refuse(*_, **__):
        raise EngineRefusedError(message)

    class Refusing:
        sample = staticmethod(refuse)

    return Refusing()


OVERFLOW = "engine: the prompt has 900 tokens and the maximum context length is 512, so nothing can be sampled"


async def test_a_context_that_is_too_long_is_said_as_each_vendors_programs_expect():
    async with served(refusing(OVERFLOW)) as its:
        with pytest.raises(openai.BadRequestError) as chat:
            await its.openai.chat.completions.create(model="policy", messages=[USER])
        with pytest.raises(openai.BadRequestError) as responses:
            await its.openai.responses.create(model="policy", input="a")
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 511 maximum"):
            await its.anthropic.messages.create(model="policy", max_tokens=9, messages=[USER])
        assert its.recorder.end().reason is RolloutReason.PROMPT_TOO_LONG
    assert chat.value.code == responses.value.code == "context_length_exceeded"
    assert "maximum context length is 511 tokens" in str(chat.value)


async def test_a_program_that_shortens_its_history_after_an_overflow_is_not_truncated():
    def say(turn, text):
        return EngineRefusedError(OVERFLOW) if "long" in text else "Done."

    async with served(say) as its:
        await its.anthropic.messages.create(model="policy", max_tokens=9, messages=[USER])
        with pytest.raises(anthropic.BadRequestError):
            await its.anthropic.messages.create(model="policy", max_tokens=9, messages=[USER | {"content": "long"}])
        assert its.recorder.end() is TruncationReason.CONTEXT
        await its.anthropic.messages.create(model="policy", max_tokens=9, messages=[USER | {"content": "short"}])
    assert its.recorder.end() is None


async def test_a_limit_is_an_empty_answer_that_says_so_and_then_an_error():
    async with served(["one"] * 9, max_turns=1) as its:
        ask = its.anthropic.messages
        answer = await ask.create(model="policy", max_tokens=9, messages=[USER])
        messages = [USER, {"role": "assistant", "content": [block.model_dump() for block in answer.content]}, USER]
        for _ in range(3):
            answer = await ask.create(model="policy", max_tokens=9, messages=messages)
            assert (answer.stop_reason, answer.content[0].text) == ("max_tokens", "")
        assert its.recorder.end() is TruncationReason.MAX_TURNS
        with pytest.raises(anthropic.BadRequestError, match="max_turns"):
            await ask.create(model="policy", max_tokens=9, messages=messages)


@pytest.mark.parametrize("streams", [False, True])
async def test_no_engine_is_503_or_529_with_a_time_to_come_back(streams):
    class Gone:
        async def sample(self, *_, **__):
            raise EngineUnavailableError("no engine answers")

    async with served(Gone()) as its, aiohttp.ClientSession() as session:
        for path, status in (("chat/completions", 503), ("responses", 503), ("messages", 529)):
            body = {"messages": [USER], "stream": streams} if path != "responses" else {"input": "a", "stream": streams}
            async with session.post(f"{its.url}/{its.key}/v1/{path}", json=body) as answer:
                assert (answer.status, answer.headers["Retry-After"]) == (status, "5")
        assert isinstance(its.recorder.error, EngineUnavailableError)


@pytest.mark.parametrize("way", WAYS)
async def test_a_stream_says_that_it_is_alive_and_tells_an_error_after_its_head(way, monkeypatch):
    monkeypatch.setattr(endpoint_module, "_PING_S", 0.02)
    outcome = []

    class Slow(Scripted):
        async def sample(self, *args, **kwargs):
            await anyio.sleep(0.1)
            if outcome:
                raise outcome[0]
            return await super().sample(*args, **kwargs)

    async with served(Slow(SAYS)) as its:
        said, _ = await way(its, streams=True)
        assert said == "Done."
        outcome.append(EngineRefusedError("the engine took fire"))
        with pytest.raises((openai.APIError, anthropic.APIError, AssertionError), match=r"took fire|response\.failed"):
            await way(its, streams=True)


async def test_stop_texts_and_the_requests_own_limit_reach_the_engine_and_end_the_text():
    async with served(["one STOP two", "three"]) as its:
        asked = {"model": "policy", "messages": [USER]}
        answer = await its.openai.chat.completions.create(**asked, stop=["STOP"], max_completion_tokens=7_000)
        assert answer.choices[0].message.content == "one "
        (_, options, _), *_ = its.sampler.asked
        assert options.stop == ("STOP",)
        assert options.max_tokens == its.recorder._context.limits.max_tokens_per_turn
        await its.anthropic.messages.create(**asked, max_tokens=3)
        assert its.sampler.asked[1][1].max_tokens == 3


async def test_only_one_call_is_given_if_the_program_wants_one():
    async with served([LIST + LIST, "Done."]) as its:
        asked = {"model": "policy", "tools": [CHAT_TOOL], "parallel_tool_calls": False}
        answer = await its.openai.chat.completions.create(messages=[USER], **asked)
        message = answer.choices[0].message
        assert len(message.tool_calls) == 1
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "a.txt"}
        kept = message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True)
        await its.openai.chat.completions.create(messages=[USER, kept, result], **asked)
        assert len(its.recorder.record()[0]) == 1


async def test_requests_of_an_episode_hold_a_bounded_part_of_the_workers_memory(monkeypatch):
    monkeypatch.setattr(answers_module, "_MAX_HELD", 3000)
    began, go_on = anyio.Event(), anyio.Event()

    class Waiting(Scripted):
        async def sample(self, *args, **kwargs):
            began.set()
            await go_on.wait()
            return await super().sample(*args, **kwargs)

    async with (
        served(Waiting(["one"] * 9)) as its,
        aiohttp.ClientSession() as session,
        anyio.create_task_group() as tasks,
    ):

        async def ask(text):
            body = {"messages": [{"role": "user", "content": text}]}
            async with session.post(f"{its.url}/{its.key}/v1/messages", json=body) as answer:
                return answer.status, await answer.text()

        tasks.start_soon(ask, "a" * 2000)
        await began.wait()
        status, why = await ask("b" * 2000)
        assert (status, "hold more than" in why) == (400, True)
        go_on.set()
        assert (await ask("c" * 200))[0] == 200
    assert its.recorder.end() is None
