"""What the probe of an engine detects, and which engines it refuses."""

import gc
import socket
from contextlib import suppress
from functools import partial

import aiohttp
import anyio
import anyio.lowlevel
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from stream.errors import EngineError, EngineUnavailableError
from stream.records import Span
from tests.cases import engines
from tests.cases.ports import free_port
from tests.integration.test_engine_client import reply
from tests.integration.test_local_engine import models, serving  # noqa: F401  (a fixture)
from tests.scripted_engine.answers import Fault
from tests.scripted_engine.engine import ScriptedEngine
from workers.engine_api.http_server import listen
from workers.rollout.engine_client.client import EngineClient
from workers.rollout.engine_client.sampling import SamplingOptions
from workers.rollout.engine_client.sampling_apis import CompletionsApi, GenerateApi
from workers.settings import EvalSettings, RolloutSettings
from workers.settings.toml_file import parse_settings

pytestmark = pytest.mark.models

WARM = SamplingOptions(temperature=0.7, max_tokens=8)
PLAIN = SamplingOptions(temperature=1.0, max_tokens=8)


client_of = partial(engines.client_of, attempts=1, reconnect_s=0.5)


@pytest.mark.parametrize(("closed", "route"), [(set(), GenerateApi), ({GenerateApi.path}, CompletionsApi)])
async def test_generate_is_used_if_it_is_open_and_completions_otherwise(closed, route):
    async with ScriptedEngine(reply, version="3") as engine, client_of(engine.url) as client:
        engine.missing_routes = closed
        with capture_logs() as lines:
            await client.wait_until_ready()
            sampled = await client.sample([5, 6], PLAIN, min_policy_version=3)
    (result,) = [line for line in lines if line["event"] == "engine.found"]
    assert (result["route"], result["version"], result["max_length"]) == (route.path, "scripted", 4096)
    assert (sampled.token_ids, sampled.spans) == ([7, 8, 2], [Span(3, 0, 3)])
    assert engine.request_count == 1, "requests of the probe do not count"


@pytest.mark.parametrize("closed", [set(), {GenerateApi.path}], ids=["generate", "completions"])
@pytest.mark.parametrize(
    ("sampling", "fit"),
    [
        (PLAIN, True),
        (SamplingOptions(temperature=0.0, max_tokens=8), True),
        (SamplingOptions(temperature=0.0, max_tokens=8, top_k=4), True),
        (WARM, False),
        (SamplingOptions(temperature=1.0, max_tokens=8, top_p=0.9), False),
        (SamplingOptions(temperature=1.0, max_tokens=8, min_p=0.1), False),
        (SamplingOptions(temperature=1.0, max_tokens=8, top_k=2), False),
        (SamplingOptions(temperature=1.0, max_tokens=8, min_tokens=1), False),
        (SamplingOptions(temperature=0.0, max_tokens=8, logit_bias={4: 1.0}), False),
    ],
    ids=lambda case: case.description if isinstance(case, SamplingOptions) else "",
)
async def test_raw_logprobs_are_accepted_only_if_they_match_the_sampling_distribution(sampling, fit, closed):
    async with ScriptedEngine(reply, version="0") as engine:
        engine.missing_routes, engine.reports_raw_logprobs = closed, True
        async with client_of(engine.url, sampling_options=[PLAIN, sampling]) as client:
            if fit:
                await client.wait_until_ready()
            else:
                with pytest.raises(EngineError, match=rf"{engine.url}.*--logprobs-mode processed_logprobs"):
                    await client.wait_until_ready()
        engine.reports_raw_logprobs = False
        async with client_of(engine.url, sampling_options=[PLAIN, sampling]) as client:
            await client.wait_until_ready()
            assert (await client.sample([5], sampling)).token_ids == [6, 7, 2]


@pytest.mark.parametrize("closed", [set(), {GenerateApi.path}], ids=["generate", "completions"])
@pytest.mark.parametrize("sampling", [PLAIN, WARM], ids=lambda sampling: sampling.description)
async def test_logits_are_refused_although_their_gaps_look_processed(sampling, closed):
    async with ScriptedEngine(reply, version="0") as engine:
        engine.missing_routes, engine.reports_logits = closed, True
        with anyio.fail_after(5):
            async with client_of(engine.url, sampling_options=[sampling], reconnect_s=60) as client:
                with pytest.raises(EngineError, match=rf"{engine.url}.*above 0.*--logprobs-mode processed_logprobs"):
                    await client.wait_until_ready()


async def test_an_engine_with_a_short_context_is_reported():
    longest = SamplingOptions(temperature=1.0, max_tokens=5000)
    async with ScriptedEngine(reply, version="0") as engine:
        for samplings, warnings in (([PLAIN], 0), ([PLAIN, longest], 1)):
            with capture_logs() as lines:
                async with client_of(engine.url, sampling_options=samplings) as client:
                    await client.wait_until_ready()
            assert [line["event"] for line in lines].count("engine.context_too_short") == warnings


async def test_a_client_probes_what_the_run_and_its_evaluations_need():
    table = {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": [{"ref": "a:b"}]}
    alone = parse_settings(table | {"eval": {}})
    evaluated = parse_settings(table | {"eval": {"path": "e", "temperature": 0.6}})
    sampling_options = [
        EngineClient.from_settings(settings, ["http://x"]).sampling_options for settings in (alone, evaluated)
    ]
    assert [[sampling.temperature for sampling in each] for each in sampling_options] == [[1.0], [1.0, 0.6]]
    assert RolloutSettings().temperature == EvalSettings().temperature == 1


async def test_the_local_engine_passes_the_same_probe(models):  # noqa: F811
    async with serving(models["llama-untied", "A"]) as engine:
        samplings = [WARM, SamplingOptions(temperature=0.7, max_tokens=8, top_k=3, logit_bias={5: 2.0}, min_tokens=2)]
        async with client_of(engine.url, sampling_options=samplings) as client:
            await client.wait_until_ready()
            assert len((await client.sample([5, 6], samplings[1], min_policy_version=-1)).token_ids) >= 2


async def test_a_server_without_versions_is_refused_with_the_remedy():
    async with ScriptedEngine(reply, version="0") as engine, client_of(engine.url) as client:
        engine.missing_routes = {"/weight_info"}
        with pytest.raises(EngineError, match=rf"{engine.url}.*VLLM_SERVER_DEV_MODE=1"):
            await client.sample([5], PLAIN, min_policy_version=0)
        assert (await client.sample([5], PLAIN, min_policy_version=-1)).token_ids == [6, 7, 2]


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({}, "/version answers 404"),
        ({"/version": b"<html>"}, "/version"),
        ({"/version": b'{"version": "1"}', "/v1/models": b'{"data": []}'}, "not that of vLLM's API"),
        ({"/version": b"{}", "/v1/models": b'{"data": [{"id": "m"}]}'}, "not that of vLLM's API"),
        ({"/version": b'{"version": "1"}', "/v1/models": b'{"data": [{"id": "m"}]}'}, "answers 404"),
    ],
    ids=["nothing", "a page", "no model", "no version", "no route"],
)
async def test_a_server_that_is_not_vllm_is_refused(answers, message):
    async def answer(http: web.Request) -> web.Response:
        body = b"" if http.path == "/health" else answers.get(http.path)
        return web.Response(status=404) if body is None else web.Response(body=body)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with listen(app, "127.0.0.1", 0) as url, client_of(url) as client:
        with pytest.raises(EngineError, match=message) as refused:
            await client.wait_until_ready()
    assert url in str(refused.value)


async def test_another_server_at_the_same_address_is_probed_again():
    port = free_port()
    async with client_of(f"http://127.0.0.1:{port}", sampling_options=[WARM], attempts=3, reconnect_s=3) as client:
        async with ScriptedEngine(reply, version="1", port=port):
            await client.sample([5], WARM)
        async with ScriptedEngine(reply, version="1", port=port) as engine:
            engine.missing_routes = {GenerateApi.path}
            assert (await client.sample([5], WARM)).spans == [Span(1, 0, 3)]
        async with ScriptedEngine(reply, version=None, port=port) as engine, anyio.create_task_group() as tasks:
            engine.reports_raw_logprobs = True

            async def trainer() -> None:
                await anyio.sleep(0.5)
                engine.version = "2"

            tasks.start_soon(trainer)
            with pytest.raises(EngineError, match="raw logits"):
                await client.sample([5], WARM, min_policy_version=1)
        assert engine.request_count == 0


async def test_another_server_over_completions_gets_no_request_before_it_has_weights(monkeypatch):
    """It takes over the address while the version of the server before it is still fresh."""
    monkeypatch.setattr("workers.rollout.engine_client.engine_state._VERSION_KEPT_S", 60.0)
    port = free_port()
    async with client_of(f"http://127.0.0.1:{port}", attempts=3, reconnect_s=0.5) as client:
        async with ScriptedEngine(reply, version="1", port=port) as engine:
            engine.missing_routes = {GenerateApi.path}
            await client.sample([5], PLAIN, min_policy_version=1)
            before = engine.query_counts["/weight_info"]
            await client.sample([5], PLAIN, min_policy_version=1)
            assert engine.query_counts["/weight_info"] == before + 1, "the version after a turn serves the next one"
        async with ScriptedEngine(reply, version=None, port=port) as engine:
            engine.missing_routes = {GenerateApi.path}
            with pytest.raises(EngineUnavailableError):
                await client.sample([5], PLAIN, min_policy_version=1)
            assert engine.request_count == 0


async def test_many_concurrent_requests_probe_an_engine_once():
    async with ScriptedEngine(reply, version="0") as engine, client_of(engine.url) as client:
        async with anyio.create_task_group() as tasks:
            for _ in range(50):
                tasks.start_soon(client.sample, [5], PLAIN)
        assert engine.query_counts["/version"] == 1


# Over completions


@pytest.mark.parametrize(
    "fault",
    ["500", "429", "hang", "reset", "garbage", "count_mismatch", "nan_logprob", "unknown_logprob", "abort", "empty"],
)
async def test_a_fault_over_completions_is_not_a_sample(fault: Fault):
    async with ScriptedEngine(reply, version="0") as engine, client_of(engine.url, attempts=3, timeout_s=0.5) as client:
        engine.missing_routes = {GenerateApi.path}
        engine.faults = lambda number, _: fault if number == 0 else None
        assert (await client.sample([5], PLAIN)).token_ids == [6, 7, 2]
        assert engine.request_count == 2
        engine.faults = lambda *_: fault
        with pytest.raises(EngineError):
            await client.sample([5], PLAIN)


async def test_an_update_during_a_completions_request_leaves_the_older_version():
    async with ScriptedEngine(reply, version="4", delay_s=0.4) as engine, client_of(engine.url) as client:
        engine.missing_routes = {GenerateApi.path}
        await client.wait_until_ready()

        async def trainer() -> None:
            await anyio.sleep(0.2)
            engine.version = "5"

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(trainer)
            assert (await client.sample([5], PLAIN, min_policy_version=4)).spans == [Span(4, 0, 3)]
        assert (await client.sample([5], PLAIN, min_policy_version=4)).spans == [Span(5, 0, 3)]


async def test_completions_requests_of_one_moment_share_the_queries_of_the_version():
    async with ScriptedEngine(reply, version="4") as engine, client_of(engine.url) as client:
        engine.missing_routes = {GenerateApi.path}
        await client.wait_until_ready()
        before = engine.query_counts["/weight_info"]
        async with anyio.create_task_group() as tasks:
            for _ in range(50):
                tasks.start_soon(client.sample, [5], PLAIN)
        assert 2 <= engine.query_counts["/weight_info"] - before < 50  # alone, each would need two


async def test_an_engine_that_lost_its_version_during_a_request_gave_no_sample():
    async with (
        ScriptedEngine(reply, version="4", delay_s=0.4) as engine,
        client_of(engine.url, reconnect_s=10) as client,
    ):
        engine.missing_routes = {GenerateApi.path}
        await client.wait_until_ready()

        async def restarted() -> None:
            await anyio.sleep(0.2)
            engine.version = None
            await anyio.sleep(0.4)
            engine.version = "6"

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(restarted)
            assert (await client.sample([5], PLAIN, min_policy_version=4)).spans == [Span(6, 0, 3)]
        assert engine.request_count == 2


async def test_the_models_generation_defaults_are_overridden():
    seen: list[dict] = []

    async def answer(http: web.Request) -> web.Response:
        if http.path == CompletionsApi.path:
            seen.append(await http.json())
        if http.path == GenerateApi.path:
            return web.Response(status=403)
        body, headers = await http.read(), {"Content-Type": "application/json"}
        async with session.request(http.method, engine.url + http.path, data=body, headers=headers) as response:
            return web.Response(status=response.status, body=await response.read())

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with (
        ScriptedEngine(reply, version="0") as engine,
        aiohttp.ClientSession() as session,
        listen(app, "127.0.0.1", 0) as url,
        client_of(url) as client,
    ):
        await client.sample([5], PLAIN)
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "temperature": 1.0, "repetition_penalty": 1.0}
    neutral |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "n": 1, "min_tokens": 0}
    assert neutral.items() <= seen[-1].items()


async def test_a_connection_accepted_just_before_a_server_closes_is_closed(recwarn):
    """asyncio forgets a connection that is not quite accepted when the server closes, so `listen` waits for it."""
    for rounds in range(6):
        with socket.socket() as client:
            client.setblocking(False)
            async with listen(web.Application(), "127.0.0.1", 0) as url:
                with suppress(BlockingIOError):
                    client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
                for _ in range(rounds):
                    await anyio.lowlevel.checkpoint()
    gc.collect()
    assert [str(each.message) for each in recwarn if "unclosed transport" in str(each.message)] == []
