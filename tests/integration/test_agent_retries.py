"""A request that is repeated: the same answer if the first one was lost, another one if not."""

import logging

import aiohttp
import anyio
import pytest

from tests.cases.agent_requests import recorded
from tests.integration.test_agent_endpoint import USER, served
from tests.unit.test_episode import Scripted


class Gate(Scripted):
    """A sampler that waits for `open`."""

    def __init__(self, script):
        super().__init__(script)
        self.open, self.began = anyio.Event(), anyio.Event()

    async def sample(self, *args, **kwargs):
        self.began.set()
        await self.open.wait()
        return await super().sample(*args, **kwargs)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("is_sampled", [False, True], ids=["while it is sampled", "after that"])
async def test_an_answer_that_was_lost_on_its_way_is_not_sampled_again(streams, is_sampled):
    sampler = Gate(lambda turn, text: f"answer {len(sampler.asked)}")
    async with served(sampler) as its, aiohttp.ClientSession() as session:
        url, body = f"{its.url}/{its.key}/v1/messages", {"messages": [USER], "stream": streams}
        with anyio.move_on_after(5) as scope:
            async with anyio.create_task_group() as tasks:

                async def leave():
                    await session.post(url, json=body)

                tasks.start_soon(leave)
                await sampler.began.wait()
                tasks.cancel_scope.cancel()  # the connection breaks while the turn is sampled
        assert not scope.cancelled_caught
        await anyio.sleep(0.1)

        async def let_go():
            await anyio.sleep(0 if is_sampled else 0.3)
            sampler.open.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(let_go)
            await anyio.sleep(0.1)
            async with session.post(url, json=body | {"stream": False}) as answer:
                again = await answer.json()
        assert again["content"][0]["text"] == "answer 1"
        assert len(sampler.asked) == 1
        async with session.post(url, json=body | {"stream": False}) as answer:  # delivered: now it is a second answer
            assert (await answer.json())["content"][0]["text"] == "answer 2"
    assert len(its.recorder.record()[0]) == 2


@pytest.mark.parametrize(
    "headers",
    [[{"x-stainless-retry-count": count} for count in "012"], [{"Idempotency-Key": "a"}] * 3],
    ids=["counted", "named"],
)
async def test_a_request_that_says_that_it_is_a_retry_gets_the_same_answer(headers):
    sampler = Scripted(lambda turn, text: f"answer {len(sampler.asked)}")
    async with served(sampler) as its, aiohttp.ClientSession() as session:
        said = []
        for each in [*headers, {"Idempotency-Key": "another"}]:
            url = f"{its.url}/{its.key}/v1/chat/completions"
            async with session.post(url, json={"messages": [USER]}, headers=each) as answer:
                said.append((await answer.json())["choices"][0]["message"]["content"])
    assert said == [*["answer 1"] * 3, "answer 2"]
    assert len(sampler.asked) == 2


async def test_two_requests_at_once_are_two_answers():
    sampler = Scripted(lambda turn, text: f"answer {len(sampler.asked)}")
    async with served(sampler) as its:
        said = []

        async def one():
            answer = await its.openai.chat.completions.create(model="policy", messages=[USER])
            said.append(answer.choices[0].message.content)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one)
            tasks.start_soon(one)
    assert sorted(said) == ["answer 1", "answer 2"]


async def said_to(name, *, numbers=(0, 0, 0), headers=()):
    """Send recorded requests of a program, and read each answer to its end; returns what the model said."""
    requests = recorded(name)
    sampler = Scripted(lambda turn, text: f"answer {len(sampler.asked)}")
    async with served(sampler) as its, aiohttp.ClientSession() as session:
        said = []
        for number in numbers:
            request = requests[number]
            kept = {key: value for key, value in request.headers.items() if key.lower() != "authorization"}
            kept |= {"Authorization": f"Bearer {its.key}"} | dict(headers)
            async with session.post(its.url + request.path, json=request.body, headers=kept) as answer:
                assert answer.status == 200, await answer.text()
                text = await answer.text()
            (number_,) = {part[0] for part in text.split("answer ")[1:]}
            said.append(int(number_))
    return said


@pytest.mark.parametrize("name", ["claude-code-turns", "codex-turns", "opencode-turns"])
async def test_a_program_that_repeats_only_what_it_lost_gets_an_answer_that_was_cut_behind_us_once_more(name):
    assert await said_to(name) == [1, 1, 2]


async def test_claude_code_asks_again_without_a_stream_and_gets_the_answer_that_it_lost():
    assert await said_to("claude-code-lost-answer", numbers=(0, 1)) == [1, 1]


async def test_a_request_with_another_one_between_is_no_repetition():
    assert await said_to("claude-code-turns", numbers=(0, 1, 0)) == [1, 2, 3]


@pytest.mark.parametrize("name", ["mini-swe-agent-turns", "langgraph-openai-turns", "openai-agents-chat-turns"])
async def test_other_programs_get_a_second_answer_unless_they_say_that_they_repeat(name):
    assert await said_to(name, headers={"x-stainless-retry-count": "0"}.items()) == [1, 2, 3]
    assert await said_to(name, headers={"x-stainless-retry-count": "1"}.items()) == [1, 1, 1]


async def test_sub_agents_with_the_same_task_have_an_answer_each():
    (request, *_) = recorded("claude-code-turns")
    sampler = Scripted(lambda turn, text: f"answer {len(sampler.asked)}")
    async with served(sampler) as its, aiohttp.ClientSession() as session:
        for agent in "ab":
            headers = {"x-claude-code-session-id": "s", "x-claude-code-agent-id": agent, "x-api-key": its.key}
            async with session.post(its.url + request.path, json=request.body, headers=headers) as answer:
                await answer.read()
    assert len(sampler.asked) == 2


async def test_a_connection_that_is_lost_within_a_request_leaves_no_error_in_the_log():
    errors, handler = [], logging.Handler(logging.ERROR)
    handler.emit = errors.append
    logging.getLogger("aiohttp.server").addHandler(handler)
    async with served(["one"]) as its:
        host, port = its.url.removeprefix("http://").split(":")
        for part in (b"", b'{"messages": '):
            head = f"POST /{its.key}/v1/messages HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: 900\r\n\r\n"
            async with await anyio.connect_tcp(host, int(port)) as client:
                await client.send(head.encode() + part)
                await anyio.sleep(0.1)
        await anyio.sleep(0.2)
    logging.getLogger("aiohttp.server").removeHandler(handler)
    assert [record.getMessage() for record in errors] == []
