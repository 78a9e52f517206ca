"""`POST /v1/chat/completions` of `penstock serve`, asked by OpenAI's own client."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import aiohttp
import anyio
import anyio.to_thread
import openai
import pytest

from tests.base_models.demo_model import make_model
from workers.demo.base_models import write_base_model
from workers.launch.serve import choose_server

pytestmark = pytest.mark.models

ASK = [{"role": "user", "content": "Start with 97, times 7."}]
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"amount": {"type": "integer"}}}},
}


@pytest.fixture(scope="module")
def random_model(tmp_path_factory) -> Path:
    """Folder of a model with random weights: it samples any token, and hardly ever ends a turn."""
    folder = tmp_path_factory.mktemp("models") / "random"
    make_model(folder, 1)
    return folder


@pytest.fixture(scope="module")
def tool_caller(tmp_path_factory) -> Path:
    """Folder of the shipped model, which calls tools."""
    folder = tmp_path_factory.mktemp("models") / "tool-caller"
    write_base_model("tool-caller", folder)
    return folder


@asynccontextmanager
async def client_of(model: Path, *settings: str) -> AsyncIterator[tuple[openai.AsyncOpenAI, str]]:
    """Serve a model as the command does; yield a client, and the server's URL."""
    urls: list[str] = []
    listening = anyio.Event()

    def ready(url: str) -> None:
        urls.append(url)
        listening.set()

    overrides = ("run.threads=1", "engine.max_model_len=300", *settings)
    serve = await anyio.to_thread.run_sync(choose_server, model, overrides, "auto", "float32", "127.0.0.1")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(serve, port=0, ready=ready))
        await listening.wait()
        async with openai.AsyncOpenAI(base_url=f"{urls[0]}/v1", api_key="none", max_retries=0) as client:
            yield client, urls[0]
        tasks.cancel_scope.cancel()


async def metric(session: aiohttp.ClientSession, url: str, name: str) -> float:
    """Return a figure of the engine."""
    async with session.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"vllm:{name} "))


async def until_running(session: aiohttp.ClientSession, url: str, count: int) -> None:
    """Wait until the engine samples this many sequences."""
    with anyio.fail_after(20):
        while await metric(session, url, "num_requests_running") != count:
            await anyio.sleep(0.01)


@pytest.mark.anyio
async def test_a_conversation_is_continued_and_the_same_seed_gives_the_same_answers(random_model):
    async with client_of(random_model) as (client, _):
        (model,) = (await client.models.list()).data
        ask = partial(client.chat.completions.create, model=model.id, messages=ASK, max_tokens=12)
        first = await ask(seed=5, n=3)
        again = await ask(seed=5, n=3)
        limited = await ask(max_completion_tokens=4, temperature=0.0, top_p=0.9)
    texts = [choice.message.content for choice in first.choices]
    assert [choice.message.content for choice in again.choices] == texts
    assert len(set(texts)) == 3, "each choice has a seed of its own"
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert {choice.finish_reason for choice in first.choices} == {"length"}
    assert first.usage.completion_tokens == 36
    assert first.usage.total_tokens == first.usage.prompt_tokens + 36
    assert limited.usage.completion_tokens == 4


@pytest.mark.anyio
async def test_a_stream_brings_the_same_text_piece_by_piece(random_model):
    async with client_of(random_model) as (client, _):
        ask = partial(client.chat.completions.create, model=str(random_model), messages=ASK, max_tokens=60, seed=3, n=2)
        whole = await ask()
        stream = await ask(stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage == whole.usage
    for index, choice in enumerate(whole.choices):
        parts = [part for chunk in chunks for part in chunk.choices if part.index == index]
        assert parts[0].delta.role == "assistant"
        texts = [part.delta.content for part in parts if part.delta.content]
        assert len(texts) > 10, "the text arrives in one piece"
        assert "".join(texts) == choice.message.content
        assert [part.finish_reason for part in parts if part.finish_reason] == [choice.finish_reason]


@pytest.mark.anyio
async def test_an_answer_ends_before_a_stop_string_whole_and_streamed(random_model):
    async with client_of(random_model) as (client, _):
        ask = partial(client.chat.completions.create, model=str(random_model), messages=ASK, max_tokens=40, seed=7)
        text = (await ask()).choices[0].message.content
        stop = text[len(text) // 2 :][:3]
        whole = (await ask(stop=[stop, "never-written"])).choices[0]
        stream = await ask(stop=stop, stream=True)
        parts = [chunk.choices[0] async for chunk in stream]
    assert whole.message.content == text[: text.index(stop)]
    assert whole.finish_reason == "stop"
    assert "".join(part.delta.content or "" for part in parts) == whole.message.content
    assert parts[-1].finish_reason == "stop"


@pytest.mark.anyio
async def test_log_probs_are_those_of_the_sampled_tokens(random_model):
    async with client_of(random_model) as (client, _):
        ask = partial(client.chat.completions.create, model=str(random_model), messages=ASK, max_tokens=8, seed=2)
        whole = (await ask(logprobs=True, top_logprobs=3)).choices[0]
        stream = await ask(logprobs=True, stream=True)
        parts = [chunk.choices[0].logprobs async for chunk in stream]
    streamed = [entry for part in parts if part for entry in part.content]
    entries = whole.logprobs.content
    assert len(entries) == 8
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]
    expected = pytest.approx([entry.logprob for entry in entries], abs=1e-5)  # its prompt's keys are cached by now
    assert [entry.logprob for entry in streamed] == expected
    for entry in entries:
        assert entry.logprob < 0
        assert bytes(entry.bytes).decode() == entry.token
        top = [other.logprob for other in entry.top_logprobs]
        assert top == sorted(top, reverse=True)


@pytest.mark.anyio
async def test_a_tool_is_called_and_its_result_goes_back(tool_caller):
    async with client_of(tool_caller) as (client, _):
        ask = partial(client.chat.completions.create, model=str(tool_caller), tools=[TOOL], temperature=0.0)
        (choice,) = (await ask(messages=ASK)).choices
        stream = await ask(messages=ASK, stream=True)
        parts = [chunk.choices[0] async for chunk in stream]
        as_text = (await ask(messages=ASK, tool_choice="none")).choices[0]
        (call,) = choice.message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "104"}
        after = await ask(messages=[*ASK, choice.message.model_dump(exclude_none=True), result])
    assert choice.finish_reason == "tool_calls"
    assert call.function.name == "add"
    assert isinstance(json.loads(call.function.arguments)["amount"], int)
    (streamed,) = [part.delta.tool_calls[0] for part in parts if part.delta.tool_calls]
    assert (streamed.index, streamed.id, streamed.function.name) == (0, call.id, "add")
    assert streamed.function.arguments == call.function.arguments
    assert "".join(part.delta.content or "" for part in parts) == (choice.message.content or "")
    assert parts[-1].finish_reason == "tool_calls"
    assert as_text.message.tool_calls is None
    assert "<tool_call>" in as_text.message.content
    assert after.choices[0].message.role == "assistant"
    assert after.usage.prompt_tokens > 30


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"messages": [{"role": "user", "content": "long " * 400}]}, "maximum context length is 300"),
        ({"messages": []}, "at least one message"),
        ({"messages": ASK, "temperature": -1}, "temperature"),
        ({"messages": ASK, "tool_choice": "required"}, "cannot force a call; use 'auto' or 'none'"),
        ({"messages": ASK, "presence_penalty": 1.0}, "no penalties"),
        ({"messages": ASK, "response_format": {"type": "json_object"}}, "cannot constrain the answer"),
        ({"messages": ASK, "tools": [{"type": "function"}]}, "function"),
        ({"messages": ASK, "logprobs": None, "top_logprobs": 2}, "set logprobs to true"),
        ({"messages": ASK, "stop": [""]}, "empty string"),
        ({"messages": ASK, "extra_body": {"beam_width": 4}}, "beam_width"),
    ],
)
async def test_a_request_that_cannot_be_served_is_refused_with_the_reason(random_model, body, says):
    async with client_of(random_model) as (client, _):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match=says.replace("(", r"\(")):
                await client.chat.completions.create(model=str(random_model), stream=stream, **body)


@pytest.mark.anyio
async def test_unknown_models_and_bodies_that_are_no_json_are_refused(random_model):
    async with client_of(random_model) as (client, url), aiohttp.ClientSession() as session:
        with pytest.raises(openai.NotFoundError, match="'gpt-x' is not served here"):
            await client.chat.completions.create(model="gpt-x", messages=ASK)
        json_type = {"Content-Type": "application/json"}
        for body in (b"{", b"[]", b"\xff", b'{"messages": ' + b"[" * 200_000):
            async with session.post(f"{url}/v1/chat/completions", data=body, headers=json_type) as response:
                assert (response.status, list(await response.json())) == (400, ["error"]), body[:20]
        assert (await client.chat.completions.create(model=str(random_model), messages=ASK, max_tokens=1)).choices


@pytest.mark.anyio
async def test_a_model_without_a_chat_template_says_so(random_model, tmp_path):
    for file in random_model.iterdir():
        if file.name not in {"chat_template.jinja", "tokenizer.json", "tokenizer_config.json"}:
            (tmp_path / file.name).symlink_to(file)
    async with client_of(tmp_path) as (client, _):
        with pytest.raises(openai.BadRequestError, match=r"no tokenizer\.json"):
            await client.chat.completions.create(model=str(tmp_path), messages=ASK)


@pytest.mark.anyio
async def test_a_client_that_leaves_a_stream_frees_the_engine(random_model):
    async with client_of(random_model) as (client, url), aiohttp.ClientSession() as session:
        stream = await client.chat.completions.create(model=str(random_model), messages=ASK, stream=True, n=4)
        await anext(stream.__aiter__())
        await stream.close()
        await until_running(session, url, 0)
        sampled = await metric(session, url, "generation_tokens_total")
    assert sampled < 4 * 250, "all four were sampled to their end"


@pytest.mark.anyio
async def test_a_pause_that_aborts_ends_whole_and_streamed_answers_with_an_error(random_model):
    served = client_of(random_model, "engine.max_model_len=2000")
    async with served as (client, url), aiohttp.ClientSession() as session:
        end = json.loads((random_model / "generation_config.json").read_text())["eos_token_id"]
        never_ends = {"messages": ASK, "logit_bias": {str(end): -100}}  # a bias of -100 forbids a token
        ask = partial(client.chat.completions.create, model=str(random_model), **never_ends)
        stream = await ask(stream=True)
        await anext(stream.__aiter__())
        failed: list[openai.APIError] = []

        async def ask_whole() -> None:
            try:
                await ask()
            except openai.APIError as error:
                failed.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask_whole)
            await until_running(session, url, 2)
            async with session.post(f"{url}/pause?mode=abort", json={}) as response:
                assert response.status == 200
        with pytest.raises(openai.APIError, match="a pause of the engine"):
            async for _ in stream:
                pass
        assert "a pause of the engine" in str(failed[0])
