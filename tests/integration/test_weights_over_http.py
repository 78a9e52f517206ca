"""Weights that engines download from the trainer: what is transferred, what is refused, and to whom."""

import shutil
from pathlib import Path

import aiohttp
import anyio
import pytest
from safetensors.torch import load_file, save_file

from stream.errors import EngineError, EngineRefusedError, EngineUnavailableError, SettingsError
from tests.integration.test_local_engine import build, logprobs_of, serving, teacher, tokens_of
from workers.engine_api.discovery import EngineDiscovery
from workers.train.publishing.engine_control import EngineControlClient
from workers.train.publishing.http_transfer import serve_weights
from workers.train.publishing.publisher import WeightPublisher
from workers.train.publishing.transport import PausedUpdate

pytestmark = pytest.mark.models

KIND = "qwen3-tied"
PROMPT = [5, 7, 11, 13]


@pytest.fixture(scope="module")
def policies(tmp_path_factory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("policies")
    for seed, name in enumerate("AB"):
        build(KIND, seed).save_pretrained(home / name)
    shutil.copytree(home / "B", home / "parts")
    whole = load_file(home / "B" / "model.safetensors")
    build(KIND, 1).save_pretrained(home / "parts", max_shard_size="20KB")
    (home / "parts" / "model.safetensors").unlink(missing_ok=True)
    assert len(list((home / "parts").glob("*.safetensors"))) > 1
    (home / "other").mkdir()
    save_file({name: tensor for name, tensor in whole.items() if "norm" not in name}, home / "other/model.safetensors")
    return {name: home / name for name in ("A", "B", "parts", "other")}


def publisher_of(engine, carrier, patience_s: float = 10) -> WeightPublisher:
    return WeightPublisher(
        EngineDiscovery([engine.url]), PausedUpdate(carrier), retry_timeout_s=patience_s, update_timeout_s=20
    )


async def assert_serves(engine, policy: Path) -> None:
    params = {"max_tokens": 8, "logprobs": 1, "ignore_eos": True}
    answer = await engine.post("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": params})
    assert logprobs_of(answer) == pytest.approx(teacher(policy, PROMPT, tokens_of(answer)), abs=1e-4)


@pytest.mark.parametrize("name", ["B", "parts"])
async def test_the_local_engine_downloads_a_policy_in_one_file_or_several(policies, name):
    async with serving(policies["A"]) as engine, serve_weights("127.0.0.1", 0) as carrier:
        await assert_serves(engine, policies["A"])
        publisher = publisher_of(engine, carrier)
        await publisher.push(policies[name], 3)
        await assert_serves(engine, policies["B"])
        assert await publisher.engine_versions() == {engine.url: 3}


async def test_refused_or_damaged_weights_leave_the_old_ones(policies):
    async with serving(policies["A"]) as engine, serve_weights("127.0.0.1", 0) as carrier:
        with pytest.raises(EngineRefusedError, match="missing: model"):
            await publisher_of(engine, carrier).push(policies["other"], 1)
        await carrier.prepare(policies["B"])
        carrier.server.find(policies["B"]).files[0]["sha256"] = "0" * 64
        with pytest.raises(EngineUnavailableError, match=r"instead of 0000.*the old weights stay"):
            await publisher_of(engine, carrier, patience_s=0.3).push(policies["B"], 1)
        await assert_serves(engine, policies["A"])
        assert await publisher_of(engine, carrier).engine_versions() == {engine.url: None}


async def test_a_version_that_is_no_longer_served_is_an_error(policies, tmp_path):
    async with serve_weights("127.0.0.1", 0) as carrier:
        await carrier.prepare(policies["A"])
        for number in range(3):
            await anyio.to_thread.run_sync(shutil.copytree, policies["A"], tmp_path / str(number))
            await carrier.prepare(tmp_path / str(number))
        with pytest.raises(EngineError, match="is no longer served"):
            await carrier.transfer(EngineControlClient("http://127.0.0.1:9", 5), policies["A"], 1)


async def test_only_weight_files_are_served_under_the_secret_path(policies, tmp_path):
    async with serve_weights("127.0.0.1", 0) as carrier, aiohttp.ClientSession() as session:
        await carrier.prepare(policies["A"])
        offered = carrier.server.find(policies["A"])
        _, secret, name, _ = offered.url_path.split("/")
        here = f"{carrier.base_url}/{secret}/{name}"

        async def status(url: str) -> int:
            async with session.get(url) as response:
                return response.status

        assert await status(f"{here}/model.safetensors") == 200
        for url in (
            f"{here}/config.json",
            f"{here}/..%2F..%2Fpyproject.toml",
            f"{here}/",
            f"{carrier.base_url}/{secret}/",
            f"{carrier.base_url}/{'x' * 43}/{name}/model.safetensors",
            f"{carrier.base_url}/{secret}/0000/model.safetensors",
        ):
            assert await status(url) == 404, url
        async with session.put(f"{here}/model.safetensors", json="x") as response:
            assert response.status == 405
        for number in range(3):  # as many as are kept on disk
            folder = tmp_path / str(number)
            shutil.copytree(policies["A"], folder)
            await carrier.prepare(folder)
        assert await status(f"{here}/model.safetensors") == 404


async def test_a_port_in_use_is_a_settings_error():
    async with serve_weights("127.0.0.1", 0) as carrier:
        port = int(carrier.base_url.rpartition(":")[2])
        with pytest.raises(SettingsError, match=r"run\.address"):
            async with serve_weights("127.0.0.1", port):
                pass
