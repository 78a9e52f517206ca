"""The engine client against a scripted engine with each of its faults."""

import threading

import anyio
import msgspec
import pytest

from stream.errors import EngineRefusedError, EngineUnavailableError
from stream.records import Span
from tests.cases.engines import client_of
from tests.cases.ports import free_port
from tests.scripted_engine.answers import scripted_logprob
from tests.scripted_engine.engine import ScriptedEngine
from workers.rollout.engine_client.sampling import SamplingOptions
from workers.rollout.engine_client.sampling_apis import GenerateApi

SAMPLING = SamplingOptions(temperature=1.0, max_tokens=8, stop_token_ids=(2,), seed=4)


def reply(token_ids: list[int], _request) -> list[int]:
    return [token_ids[-1] + 1, token_ids[-1] + 2, 2]


async def test_a_sample_has_logprobs_finish_reason_and_versions():
    async with ScriptedEngine(reply, version="3") as engine, client_of(engine.url) as client:
        await client.wait_until_ready()
        sampled = await client.sample([5, 6], SAMPLING, min_policy_version=3)
    assert sampled.token_ids == [7, 8, 2]
    assert sampled.logprobs == [scripted_logprob(2 + i, token) for i, token in enumerate([7, 8, 2])]
    assert sampled.finish_reason == "stop"
    assert sampled.spans == [Span(3, 0, 3)]
    params = engine.requests[0].sampling_params
    assert (params.temperature, params.max_tokens, params.stop_token_ids, params.seed) == (1.0, 8, [2], 4)


async def test_a_long_answer_is_decoded_in_a_thread_so_that_leases_are_renewed_meanwhile(monkeypatch):
    threads = []
    whole = GenerateApi.decode

    def noted(*args, **kwargs):
        threads.append(threading.get_ident())
        return whole(*args, **kwargs)

    monkeypatch.setattr(GenerateApi, "decode", noted)
    engine = ScriptedEngine(lambda *_: [7] * 20_000, version="3", max_length=40_000)
    async with engine, client_of(engine.url) as client:
        short = await client.sample([5], SAMPLING)
        long = await client.sample([5], msgspec.structs.replace(SAMPLING, max_tokens=20_000))
    assert (len(short.token_ids), len(long.token_ids)) == (8, 20_000)
    assert set(threads[:-1]) == {threading.get_ident()}
    assert threads[-1] != threading.get_ident()


@pytest.mark.parametrize(
    "fault", ["500", "429", "hang", "reset", "garbage", "count_mismatch", "nan_logprob", "abort", "empty", "spans"]
)
async def test_one_failed_attempt_is_retried_with_success(fault: str):
    async with ScriptedEngine(reply, version="0") as engine, client_of(engine.url, timeout_s=0.5) as client:
        engine.faults = lambda number, _: fault if number == 0 else None
        sampled = await client.sample([5], SAMPLING)
    assert sampled.token_ids == [6, 7, 2]
    assert engine.request_count == 2


async def test_a_busy_engine_is_asked_again_when_it_says_however_often(monkeypatch):
    monkeypatch.setattr("workers.rollout.engine_client.health._REFUSAL_MARGIN_S", (0.0, 0.01))
    async with ScriptedEngine(reply, version="0") as engine, client_of(engine.url, attempts=2) as client:
        engine.faults = lambda number, _: "busy" if number < 5 else None
        sampled = await client.sample([5], SAMPLING)
    assert sampled.token_ids == [6, 7, 2]
    assert engine.request_count == 6


async def test_requests_go_elsewhere_while_an_engine_is_busy():
    one, two = ScriptedEngine(reply, version="0"), ScriptedEngine(reply, version="0")
    async with one, two, client_of(one.url, two.url) as client:
        await client.wait_until_ready()
        while client.healthy_count < 2:
            await anyio.sleep(0.01)
        one.retry_after, one.faults = "50", lambda *_: "busy"
        with anyio.fail_after(5):
            for prompt in range(20):
                await client.sample([prompt], msgspec.structs.replace(SAMPLING, group=f"g{prompt}"))
        assert (one.request_count, two.request_count) == (1, 20)
        assert client.healthy_count == 2


async def test_a_request_that_every_engine_refuses_for_long_is_given_back():
    async with ScriptedEngine(reply, version="0") as engine, client_of(engine.url, reconnect_s=0.3) as client:
        engine.retry_after, engine.faults = "50", lambda *_: "busy"
        with anyio.fail_after(5), pytest.raises(EngineUnavailableError, match=r"refused requests \(429 or 503\)"):
            await client.sample([5], SAMPLING)
    assert engine.request_count == 1


async def test_a_refusal_is_not_retried_and_has_the_engines_message():
    async with ScriptedEngine(reply, version="0", max_length=4) as engine, client_of(engine.url) as client:
        with pytest.raises(EngineRefusedError, match="maximum context length is 4"):
            await client.sample([1, 2, 3, 4, 5], SAMPLING)
        engine.faults = lambda *_: "400"
        with pytest.raises(EngineRefusedError, match="scripted 400"):
            await client.sample([1], SAMPLING)
    assert engine.request_count == 1


async def test_an_unavailable_engine_is_named_by_its_url():
    url = f"http://127.0.0.1:{free_port()}"
    async with client_of(url, reconnect_s=0.3) as client:
        with pytest.raises(EngineUnavailableError, match=url):
            await client.wait_until_ready()
        with pytest.raises(EngineUnavailableError, match=url):
            await client.sample([1], SAMPLING)


async def test_many_requests_wait_for_an_engine_to_recover():
    async with client_of(f"http://127.0.0.1:{free_port()}", reconnect_s=0.3) as client:
        unavailable = []

        async def ask() -> None:
            with pytest.raises(EngineUnavailableError):
                await client.sample([1], SAMPLING, min_policy_version=-1)
            unavailable.append(1)

        with anyio.fail_after(5):
            async with anyio.create_task_group() as tasks:
                for _ in range(50):
                    tasks.start_soon(ask)
    assert len(unavailable) == 50


async def test_an_engine_that_recovers_with_old_weights_gets_no_request_before_new_ones():
    port = free_port()
    samples = []
    async with client_of(f"http://127.0.0.1:{port}", reconnect_s=10) as client, anyio.create_task_group() as tasks:

        async def ask() -> None:
            samples.append(await client.sample([1], SAMPLING, min_policy_version=4))

        async with ScriptedEngine(reply, version="4", port=port):
            await ask()
        tasks.start_soon(ask)
        await anyio.sleep(0.3)
        async with ScriptedEngine(reply, version=None, port=port) as engine:
            await anyio.sleep(0.5)
            engine.version = "3"
            await anyio.sleep(0.5)
            assert len(samples) == 1
            engine.version = "5"
            with anyio.fail_after(10):
                while len(samples) < 2:
                    await anyio.sleep(0.05)
    assert [sampled.spans for sampled in samples] == [[Span(4, 0, 3)], [Span(5, 0, 3)]]


async def test_weights_that_never_come_make_the_engine_unavailable():
    async with ScriptedEngine(reply, version="2") as engine, client_of(engine.url, reconnect_s=0.3) as client:
        with pytest.raises(EngineUnavailableError, match="policy version 2, older than 3"):
            await client.sample([1], SAMPLING, min_policy_version=3)
        assert (await client.sample([1], SAMPLING, min_policy_version=2)).spans == [Span(2, 0, 3)]


async def test_an_engine_that_restarted_while_idle_gets_no_request_before_its_weights(monkeypatch):
    monkeypatch.setattr("workers.rollout.engine_client.engine_state._VERSION_FRESH_S", 0.0)
    async with ScriptedEngine(reply, version="3") as engine, client_of(engine.url) as client:
        await client.sample([1], SAMPLING, min_policy_version=3)
        engine.version = None

        async def trainer() -> None:
            await anyio.sleep(0.5)
            engine.version = "4"

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(trainer)
            assert (await client.sample([1], SAMPLING, min_policy_version=3)).spans == [Span(4, 0, 3)]
        assert engine.request_count == 2


async def test_an_engine_without_a_version_serves_only_requests_for_any_version():
    async with ScriptedEngine(reply) as engine, client_of(engine.url, reconnect_s=0.2) as client:
        with pytest.raises(EngineUnavailableError):
            await client.sample([1], SAMPLING)
        assert (await client.sample([1], SAMPLING, min_policy_version=-1)).spans == [Span(-1, 0, 3)]


async def test_cancelling_the_caller_ends_the_request_at_the_engine():
    async with ScriptedEngine(reply, version="0", delay_s=60) as engine, client_of(engine.url, timeout_s=60) as client:
        with anyio.move_on_after(0.3):
            await client.sample([1], SAMPLING)
        with anyio.fail_after(5):
            while engine.running:
                await anyio.sleep(0.01)
    assert (engine.request_count, engine.aborted_count) == (1, 1)


async def test_an_engine_whose_health_check_fails_gets_no_request():
    async with (
        ScriptedEngine(reply, version="0") as healthy,
        ScriptedEngine(reply, version="0") as unhealthy,
        client_of(unhealthy.url, healthy.url) as client,
    ):
        unhealthy.missing_routes = {"/health"}
        for _ in range(5):
            await client.sample([1], SAMPLING)
    assert (unhealthy.request_count, healthy.request_count) == (0, 5)


async def test_requests_spread_over_engines():
    async with (
        ScriptedEngine(reply, version="0", delay_s=0.1) as one,
        ScriptedEngine(reply, version="0", delay_s=0.1) as other,
        client_of(one.url, other.url) as client,
    ):
        await client.wait_until_ready()
        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(client.sample, [1], SAMPLING)
    assert (one.request_count, other.request_count) == (10, 10)
