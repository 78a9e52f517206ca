"""What the most frequent operations cost, in calls of functions, which are the same on every machine; not in seconds.

A limit is what the code needs today and a tenth. Raise one only with a figure of `benchmarks/rollout.py` beside it.
"""

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any, Self

import msgspec
import pytest

from workers.engine_api.http_connection import HttpConnection, RequestTarget
from workers.role.prometheus import engine_latency, sampled_tokens
from workers.rollout.engine_client.client import EngineClient
from workers.rollout.engine_client.probe import Capabilities
from workers.rollout.engine_client.sampling import SampledTurn, SamplingOptions
from workers.rollout.engine_client.sampling_apis import CompletionsApi, GenerateApi
from workers.rollout.token_ids import TokenIds

URL = "http://127.0.0.1:8000"
OPTIONS = SamplingOptions(temperature=1.0, max_tokens=64, stop_token_ids=(2,), seed=4, group="d:0:0", completion=1)


@pytest.fixture(autouse=True)
def no_collections() -> Iterator[None]:
    """A collection would call finalizers of what earlier tests have left."""
    gc.disable()
    yield
    gc.enable()


class CallCounter:
    """Counts calls of Python and C functions in the body, in this thread, by name.

    Example:
        >>> with CallCounter() as counter:
        ...     total = sum([1, 2])
        >>> counter.calls
        Counter({'sum': 1})
    """

    def __enter__(self) -> Self:
        self.calls: Counter[str] = Counter()
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        self.calls -= Counter({"CallCounter.__exit__": 1, "setprofile": 1})

    @property
    def count(self) -> int:
        return self.calls.total()

    def _note(self, frame: FrameType, event: str, function: object) -> None:
        if event == "call":
            self.calls[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            self.calls[getattr(function, "__qualname__", repr(function))] += 1


class SilentTransport:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.sent = b""

    def writelines(self, parts: list[bytes]) -> None:
        self.sent = b"".join(parts)

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        pass


def http_answer(api: type, tokens: int) -> bytes:
    ids = list(range(500, 500 + tokens))
    logprobs: Any = {"content": [{"token_id": token, "logprob": -0.5} for token in ids]}
    choice = {"index": 0, "token_ids": ids, "finish_reason": "stop", "logprobs": logprobs}
    if api is CompletionsApi:
        choice["logprobs"] = {"token_logprobs": [-0.5] * tokens}
    else:
        choice["weight_versions"] = [{"version": "3", "start": 0, "end": tokens}]
    body = msgspec.json.encode({"request_id": "r", "choices": [choice]})
    headers = f"Date: today\r\nServer: x\r\nContent-Length: {len(body)}\r\nContent-Type: application/json\r\n"
    return f"HTTP/1.1 200 OK\r\n{headers}\r\n".encode() + body


class WarmClient:
    """An engine client with one healthy engine, whose connection is open and answers when `sample` says so."""

    def __init__(self, api: type, engines: int) -> None:
        urls = [f"http://127.0.0.1:{8000 + i}" for i in range(engines)]
        self.client = EngineClient(urls, request_timeout_s=60, max_attempts=1, unavailable_timeout_s=1)
        self.api = api
        self._urls = urls

    async def start(self) -> None:
        client = self.client
        await client._connections.__aenter__()
        client._monitor._tasks.start_soon = lambda *_: None  # nobody probes
        client._monitor.set_engines(self._urls)
        for url, engine in client._router.engines.items():
            spans = self.api is GenerateApi
            engine.mark_healthy(Capabilities("1", "policy", 32_768, self.api(), True, reports_spans=spans))
            connection = HttpConnection(lambda _: None)
            connection.connection_made(SilentTransport())
            connection._is_reusable, connection.idle_since = True, client._connections._loop.time()
            client._connections._servers[RequestTarget.parse("GET", url).server].idle.append(connection)

    def sample(self, context: TokenIds, answer: bytes) -> SampledTurn:
        """Sample one turn, without an event loop in between that could do something else as well."""
        for engine in self.client._router.engines.values():
            engine.record_version(3, self.client._connections.connection_epoch(engine.url))
        turn = self.client.sample(context, OPTIONS, min_policy_version=3)
        turn.send(None)
        (connection,) = (c for server in self.client._connections._servers.values() for c in server.busy)
        connection.data_received(answer)
        try:
            turn.send(None)
        except StopIteration as end:
            return end.value
        raise AssertionError("the turn has not ended")


async def calls_of_a_turn(tokens: int, context: int, engines: int = 1) -> Counter[str]:
    warm = WarmClient(GenerateApi, engines)
    await warm.start()
    ids, answer = TokenIds(range(context)), http_answer(GenerateApi, tokens)
    try:
        assert warm.sample(ids, answer).token_ids == list(range(500, 500 + tokens))
        for metric in (engine_latency, sampled_tokens):
            metric.collect()  # counts what it keeps, so that the next turn does not have to
        with CallCounter() as counter:
            warm.sample(ids, answer)
    finally:
        await warm.client._connections.__aexit__(None, None, None)
    return counter.calls


async def test_a_turn_between_the_episode_and_the_engine_takes_few_calls():
    assert (await calls_of_a_turn(tokens=64, context=800)).total() <= 170  # 154


@pytest.mark.parametrize(("tokens", "context"), [(1024, 800), (64, 80_000)])
async def test_no_call_per_token_is_made_to_write_a_request_or_to_read_its_answer(tokens, context):
    assert await calls_of_a_turn(tokens, context) == await calls_of_a_turn(64, 800)


async def test_a_choice_among_engines_takes_few_calls_for_each():
    few, many = await calls_of_a_turn(64, 800, engines=2), await calls_of_a_turn(64, 800, engines=12)
    assert (many.total() - few.total()) / 10 <= 12  # 11.1
