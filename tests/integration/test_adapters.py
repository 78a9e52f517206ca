"""Adapters loaded into engines, and requests that name them, against an engine that treats adapters as vLLM does."""

import os
import time
from functools import partial
from pathlib import Path

import anyio
import pytest
from aiohttp import web

from stream.errors import EngineRefusedError, EngineUnavailableError
from stream.records import Span
from tests.cases.models import write_small_qwen3
from tests.integration.test_local_engine import serving
from tests.scripted_engine.engine import ScriptedEngine
from tests.unit.test_learner import VOCABULARY
from tests.unit.test_lora import trained
from workers.engine_api.discovery import EngineDiscovery
from workers.engine_api.http_server import listen
from workers.engine_api.wire import adapter_name
from workers.rollout.engine_client.client import EngineClient
from workers.rollout.engine_client.sampling import UNVERSIONED, SamplingOptions
from workers.settings.toml_file import parse_settings
from workers.train.model.adapter import merge_adapter
from workers.train.publishing.adapter_update import AdapterUpdate
from workers.train.publishing.policy_versions import _prune
from workers.train.publishing.publisher import WeightPublisher
from workers.train.publishing.transport import AdapterTransport, PausedUpdate, SharedFolderTransfer
from workers.vllm.launch_command import build_command, build_environment

SAMPLING = SamplingOptions(temperature=1.0, max_tokens=3, seed=4)


class LoraEngine:
    """A server with vLLM's routes for adapters, whose answers wait until the test releases them."""

    def __init__(self, **config) -> None:
        self.config = {"max_lora_rank": 8, "max_loras": 4} | config
        self.adapters: dict[str, str] = {}
        self.version = "default"
        self.orders: list[str] = []
        self.asked: list[str] = []
        self.faults: dict[str, int] = {}
        self.ends_as = ""
        """The version that answers name, if it differs from the engine's."""
        self.open = True
        """Whether VLLM_ALLOW_RUNTIME_LORA_UPDATING is set."""
        self.held = anyio.Event()
        self.held.set()

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self.told({})),
                web.get("/version", self.told({"version": "0.32.0"})),
                web.get("/is_paused", self.told({"is_paused": False})),
                web.get("/weight_info", self.weight_info),
                web.get("/server_info", self.server_info),
                web.get("/v1/models", self.models),
                web.post("/v1/load_lora_adapter", self.load),
                web.post("/v1/unload_lora_adapter", self.unload),
                web.post("/update_weight_version", self.name_version),
                web.post("/inference/v1/generate", self.generate),
            ]
        )
        return app

    def told(self, what):
        async def answer(_):
            return web.json_response(what)

        return answer

    def fault(self, name):
        left = self.faults.get(name, 0)
        self.faults[name] = left - 1
        if left > 0:
            raise web.HTTPInternalServerError(text=f"{name} failed")

    async def weight_info(self, _):
        return web.json_response({"weight_version": self.version})

    async def server_info(self, _):
        return web.json_response({"vllm_config": {"lora_config": self.config, "weight_transfer_config": None}})

    async def models(self, _):
        base = {"id": "base", "root": "/base", "parent": None, "max_model_len": 100}
        loaded = [{"id": name, "root": path, "parent": "base"} for name, path in self.adapters.items()]
        return web.json_response({"data": [base, *loaded]})

    async def load(self, request):
        body = await request.json()
        assert "load_inplace" not in body
        self.fault("load")
        if "nowhere" in body["lora_path"]:
            error = {"message": f"Loading lora failed: No adapter found for {body['lora_path']}", "code": 404}
            return web.json_response({"error": error}, status=404)
        if not self.open:
            raise web.HTTPNotFound
        if body["lora_name"] in self.adapters:
            return web.json_response({"error": {"message": "has already been loaded"}}, status=400)
        self.adapters[body["lora_name"]] = body["lora_path"]
        self.orders.append(f"load {body['lora_name']}")
        self.fault("loaded")
        return web.Response(text="Success")

    async def unload(self, request):
        name = (await request.json())["lora_name"]
        if self.adapters.pop(name, None) is None:
            return web.json_response({"error": {"message": "cannot be found"}}, status=404)
        self.orders.append(f"unload {name}")
        return web.Response(text="Success")

    async def name_version(self, request):
        self.version = (await request.json())["new_version"]
        self.orders.append(f"version {self.version}")
        return web.json_response({"success": True})

    async def generate(self, request):
        body = await request.json()
        if not body:
            return web.json_response({}, status=422)
        self.asked.append(body["model"])
        if body["model"] not in {"base", *self.adapters}:
            return web.json_response({"error": {"message": f"The model `{body['model']}` does not exist."}}, status=404)
        began = self.version
        await self.held.wait()
        if self.ends_as:
            spans = [{"version": self.ends_as, "start": 0, "end": 2}]
            return web.json_response(self.answer(spans))
        spans = [{"version": began, "start": 0, "end": 1}, {"version": self.version, "start": 1, "end": 2}]
        if began == self.version:
            spans = [{"version": began, "start": 0, "end": 2}]
        return web.json_response(self.answer(spans))

    def answer(self, spans):
        content = [{"token": f"token_id:{token}", "logprob": -1.0} for token in (7, 8)]
        choice = {"index": 0, "token_ids": [7, 8], "finish_reason": "length", "logprobs": {"content": content}}
        return {"request_id": "r", "choices": [choice | {"weight_versions": spans}]}


@pytest.fixture
async def engine():
    made = LoraEngine()
    async with listen(made.app(), "127.0.0.1", 0) as made.url:
        yield made


def publisher_of(*urls, rank=4, patience_s=5.0):
    transport = AdapterTransport(beside=AdapterUpdate(rank), merged=PausedUpdate(SharedFolderTransfer()))
    return WeightPublisher(EngineDiscovery(urls), transport, retry_timeout_s=patience_s, update_timeout_s=5)


def client_of(engine, reconnect_s=5.0):
    return EngineClient(
        [engine.url], request_timeout_s=5, max_attempts=3, unavailable_timeout_s=reconnect_s, uses_adapters=True
    )


async def test_a_version_is_loaded_then_announced_and_all_but_the_one_before_are_unloaded(engine):
    publisher = publisher_of(engine.url)
    for version in (3, 4, 7):
        await publisher.push(Path(f"/w/v{version}"), version)
        assert await publisher.engine_versions() == {engine.url: version}
    assert engine.orders == [
        *("load policy-v3", "version 3", "load policy-v4", "version 4"),
        *("load policy-v7", "version 7", "unload policy-v3"),
    ]
    assert engine.adapters == {"policy-v4": "/w/v4", "policy-v7": "/w/v7"}


@pytest.mark.parametrize("fault", ["load", "loaded"])
async def test_a_failed_or_unanswered_load_is_retried(engine, fault):
    engine.faults[fault] = 1
    await publisher_of(engine.url).push(Path("/w/v3"), 3)
    assert (engine.adapters, engine.version) == ({"policy-v3": "/w/v3"}, "3")


async def test_a_name_loaded_from_another_folder_is_loaded_again(engine):
    engine.adapters["policy-v3"] = "/of/another/run/v3"
    await publisher_of(engine.url).push(Path("/w/v3"), 3)
    assert engine.adapters == {"policy-v3": "/w/v3"}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "without --enable-lora; start vLLM with"),
        ({"max_lora_rank": 2, "max_loras": 4}, r"--max-lora-rank 2, less than lora\.rank \(4\)"),
        ({"max_lora_rank": 8, "max_loras": 1}, "--max-loras 1, so a new version would wait"),
    ],
)
async def test_an_engine_that_cannot_load_adapters_is_refused_with_the_options(engine, config, words):
    engine.config = config
    with anyio.fail_after(3), pytest.raises(EngineRefusedError, match=words):
        await publisher_of(engine.url).push(Path("/w/v3"), 3)
    assert engine.orders == []


async def test_an_engine_without_the_route_or_the_folder_is_refused(engine):
    with anyio.fail_after(3), pytest.raises(EngineRefusedError, match=r"under the same path.*'http'"):
        await publisher_of(engine.url).push(Path("/nowhere/v3"), 3)
    engine.open = False
    with anyio.fail_after(3), pytest.raises(EngineRefusedError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        await publisher_of(engine.url).push(Path("/w/v3"), 3)


async def test_an_engine_that_takes_whole_weights_alone_is_refused_with_the_alternative():
    async with ScriptedEngine(lambda *_: [1]) as other:
        other.transfer_config = None
        with anyio.fail_after(3), pytest.raises(EngineRefusedError, match=r"weights\.transport = 'files'"):
            await publisher_of(other.url).push(Path("/w/v3"), 3)


@pytest.mark.models
async def test_an_engine_that_merges_gets_the_same_adapter_and_is_asked_for_no_name(engine, tmp_path):
    base, adapter, merged = tmp_path / "base", tmp_path / "v3", tmp_path / "merged"
    write_small_qwen3(base, VOCABULARY, layers=1, tied=True)
    for folder in (adapter, merged):
        folder.mkdir()
    await anyio.to_thread.run_sync(lambda: trained(base).write_trained_weights(adapter))
    await anyio.to_thread.run_sync(merge_adapter, adapter, merged)
    async with serving(base, trusted=[]) as local, serving(merged) as whole:
        publisher = publisher_of(engine.url, local.url)
        await publisher.push(adapter, 3)
        assert await publisher.engine_versions() == {engine.url: 3, local.url: 3}
        assert engine.adapters == {"policy-v3": str(adapter)}
        async with client_of(local) as client, client_of(whole) as other:
            ours = await client.sample([1], SAMPLING, min_policy_version=3)
            theirs = await other.sample([1], SAMPLING, min_policy_version=UNVERSIONED)
        assert ours.spans == [Span(3, 0, 3)]
        assert (ours.token_ids, ours.logprobs) == (theirs.token_ids, theirs.logprobs)


@pytest.mark.models
async def test_a_request_during_which_an_adapter_is_merged_has_tokens_of_both_versions(tmp_path):
    base = write_small_qwen3(tmp_path / "base", VOCABULARY, layers=1, tied=True)
    for version in (3, 4):
        (tmp_path / f"v{version}").mkdir()
        learner = await anyio.to_thread.run_sync(partial(trained, base, steps=version))
        await anyio.to_thread.run_sync(learner.write_trained_weights, tmp_path / f"v{version}")
    long = SamplingOptions(temperature=1.0, max_tokens=390, min_tokens=390, seed=4)
    async with serving(base, trusted=[tmp_path]) as local, client_of(local) as client:
        publisher, sampled = publisher_of(local.url), []
        await publisher.push(tmp_path / "v3", 3)

        async def one():
            sampled.append(await client.sample([1], long, min_policy_version=3))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one)
            await local.until("num_requests_running", lambda count: count == 1)
            await publisher.push(tmp_path / "v4", 4)
    assert [span.version for span in sampled[0].spans] == [3, 4]


@pytest.mark.models
async def test_an_engine_that_refuses_an_adapter_of_another_base_goes_on(tmp_path):
    for name, tied in (("base", True), ("other", False)):
        write_small_qwen3(tmp_path / name, VOCABULARY, layers=1, tied=tied)
    (tmp_path / "v3").mkdir()
    await anyio.to_thread.run_sync(lambda: trained(tmp_path / "other").write_trained_weights(tmp_path / "v3"))
    async with serving(tmp_path / "base") as local:
        with anyio.fail_after(5), pytest.raises(EngineRefusedError, match="trained on other weights"):
            await publisher_of(local.url).push(tmp_path / "v3", 3)
        async with client_of(local) as client:
            assert (await client.sample([1], SAMPLING, min_policy_version=UNVERSIONED)).token_ids, (
                "it goes on with its old weights"
            )


async def test_a_request_names_the_newest_adapter_and_keeps_its_version(engine):
    publisher, sampled = publisher_of(engine.url), []
    await publisher.push(Path("/w/v3"), 3)
    async with client_of(engine) as client:
        first = await client.sample([1], SAMPLING, min_policy_version=3)
        assert first.spans == [Span(3, 0, 2)]
        engine.held = anyio.Event()

        async def one():
            sampled.append(await client.sample([1], SAMPLING, min_policy_version=3))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one)
            with anyio.fail_after(5):
                while len(engine.asked) < 3:
                    await anyio.sleep(0.01)
            await publisher.push(Path("/w/v4"), 4)
            engine.held.set()
        assert sampled[0].spans == [Span(3, 0, 2)], "it was sampled by the adapter that it named"
        assert (await client.sample([1], SAMPLING, min_policy_version=3)).spans == [Span(4, 0, 2)], (
            "the answer had told of it"
        )
    assert engine.asked[-3:] == [adapter_name(3), adapter_name(3), adapter_name(4)]


async def test_an_answer_from_before_a_newer_adapter_does_not_look_like_a_restart(engine):
    publisher = publisher_of(engine.url)
    await publisher.push(Path("/w/v3"), 3)
    async with client_of(engine) as client:
        await client.sample([1], SAMPLING, min_policy_version=3)
        probed = engine.asked.count("base")
        engine.ends_as = "3"
        await publisher.push(Path("/w/v4"), 4)
        await anyio.sleep(1.1)  # its cached version has expired
        assert (await client.sample([1], SAMPLING, min_policy_version=3)).spans == [Span(4, 0, 2)]
        assert (await client.sample([1], SAMPLING, min_policy_version=3)).spans == [Span(4, 0, 2)]
        assert engine.asked.count("base") == probed, "it was looked at anew"


async def test_a_request_for_an_unloaded_adapter_is_retried(engine):
    publisher = publisher_of(engine.url)
    await publisher.push(Path("/w/v3"), 3)
    async with client_of(engine) as client:
        await client.sample([1], SAMPLING, min_policy_version=3)
        engine.adapters.clear()  # it was restarted
        engine.version = "default"

        async def again():
            await anyio.sleep(0.3)
            await publisher.push(Path("/w/v3"), 3)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(again)
            assert (await client.sample([1], SAMPLING, min_policy_version=3)).spans == [Span(3, 0, 2)]


@pytest.mark.parametrize("reconnect_s", [0.4, 1.2])
async def test_waiting_for_an_adapter_is_bounded(engine, reconnect_s):
    engine.version = "3"  # reports the version, but has no adapter
    async with client_of(engine, reconnect_s=reconnect_s) as client:
        with anyio.fail_after(10), pytest.raises(EngineUnavailableError, match=r"policy-v3 any more|older than 3"):
            await client.sample([1], SAMPLING, min_policy_version=3)


def test_versions_that_running_requests_may_need_stay_on_disk(tmp_path):
    for version in range(6):
        (tmp_path / f"v{version:06d}").mkdir()
        age = 100.0 if version < 4 else 5.0
        os.utime(tmp_path / f"v{version:06d}", (time.time() - age,) * 2)
    _prune(tmp_path, 50.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"v{version:06d}" for version in (2, 3, 4, 5)]
    _prune(tmp_path, 0.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"v{version:06d}" for version in (3, 4, 5)]


def test_a_supervised_vllm_is_started_with_adapter_options():
    least = {"model": {"path": "m"}, "data": {"path": "d"}, "environments": {"a": "calculator"}}
    own = least | {"engine": {"server": "vllm"}}
    adapters = build_command(
        parse_settings(own | {"lora": {"rank": 12}, "weights": {"transport": "adapter"}}),
        Path("python"),
        "127.0.0.1",
        1,
        is_cpu_build=True,
    )
    place = adapters.index("--enable-lora")
    assert adapters[place : place + 3] == ["--enable-lora", "--max-lora-rank", "16"]
    assert "--weight-transfer-config" not in adapters
    merged = build_command(
        parse_settings(own | {"lora": {"rank": 12}}), Path("python"), "127.0.0.1", 1, is_cpu_build=True
    )
    assert "--weight-transfer-config" in merged
    assert "--enable-lora" not in merged
    assert build_environment({}, threads=1, is_cpu_build=True)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
