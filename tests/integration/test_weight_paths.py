"""Which files a local engine takes as weights: the run's, and those whose digests the run sends."""

import hashlib
import shutil
from pathlib import Path

import anyio.to_thread
import pytest
from safetensors.torch import load_file, save_file

from tests.cases.models import write_small_qwen3
from tests.integration.test_local_engine import serving
from workers.train.publishing.engine_control import EngineControlClient
from workers.train.publishing.transport import SharedFolderTransfer


@pytest.fixture
def model(tmp_path) -> Path:
    return write_small_qwen3(tmp_path / "model", 32, layers=1, tied=True)


@pytest.fixture
def foreign(tmp_path, model) -> Path:
    """Weights that fit the model, in a folder that is not the run's."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    weights = load_file(model / "model.safetensors")
    save_file({name: tensor * 0 for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


def digests(folder: Path, **changed: str) -> list[dict[str, object]]:
    file = folder / "model.safetensors"
    entry = {"name": file.name, "size": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    return [entry | changed]


async def begin(engine) -> None:
    await engine.post("/pause?mode=keep")
    await engine.post("/start_weight_update")


async def test_a_path_outside_of_the_runs_folder_needs_the_digests_of_its_files(model, foreign, tmp_path):
    run = tmp_path / "run"
    async with serving(model, trusted=[run]) as engine:
        await begin(engine)
        for path in (foreign, foreign / "model.safetensors", run / ".." / "elsewhere", Path("/etc/passwd")):
            refused = await engine.post("/update_weights", {"update_info": {"path": str(path)}}, 400)
            assert "send the sha256 of its files" in refused["error"]["message"]
        files = digests(foreign, sha256="0" * 64)
        refused = await engine.post("/update_weights", {"update_info": {"path": str(foreign), "files": files}}, 400)
        assert "the old weights stay" in refused["error"]["message"]
        files = digests(foreign, name="another.safetensors")
        refused = await engine.post("/update_weights", {"update_info": {"path": str(foreign), "files": files}}, 400)
        assert "has no digest of it" in refused["error"]["message"]
        await engine.post("/update_weights", {"update_info": {"path": str(foreign), "files": digests(foreign)}})
        await engine.post("/finish_weight_update", {"weight_version": "1"})


async def test_a_link_in_the_runs_folder_does_not_lead_out_of_it(model, foreign, tmp_path):
    run = tmp_path / "run"
    (run / "v1").mkdir(parents=True)
    (run / "v1" / "model.safetensors").symlink_to(foreign / "model.safetensors")
    (run / "v2").mkdir()
    index = '{"weight_map": {"w": "../../elsewhere/model.safetensors"}}'
    (run / "v2" / "model.safetensors.index.json").write_text(index)
    async with serving(model, trusted=[run]) as engine:
        await begin(engine)
        for name in ("v1", "v2"):
            refused = await engine.post("/update_weights", {"update_info": {"path": str(run / name)}}, 400)
            assert "is not in" in refused["error"]["message"]


async def test_weights_of_the_runs_folder_are_taken_through_a_linked_folder_too(model, foreign, tmp_path):
    shutil.copytree(foreign, tmp_path / "run" / "v1")
    (tmp_path / "linked").symlink_to(tmp_path / "run")
    async with serving(model, trusted=[tmp_path / "linked"]) as engine:
        await begin(engine)
        await engine.post("/update_weights", {"update_info": {"path": str(tmp_path / "run" / "v1")}})
        await engine.post("/finish_weight_update", {"weight_version": "1"})


async def test_a_trainer_sends_digests_to_an_engine_that_does_not_know_its_run(model, foreign):
    async with serving(model, trusted=[]) as engine:
        client = EngineControlClient(engine.url, 20)
        transfer = SharedFolderTransfer()
        for version in (1, 2):
            if version == 2:
                weights = await anyio.to_thread.run_sync(load_file, model / "model.safetensors")
                foreign = foreign.parent / "later"
                foreign.mkdir()
                await anyio.to_thread.run_sync(save_file, weights, foreign / "model.safetensors")
            await client.pause(keep_kv_cache=True)
            await transfer.transfer(client, foreign, version)
            await client.resume()
            assert await client.weight_version() == version


async def test_a_download_is_not_redirected(model):
    """A server that the run names cannot send the engine to another one."""
    from aiohttp import web

    from workers.engine_api.http_server import listen

    reached = []

    async def answer(request: web.Request) -> web.Response:
        reached.append(request.path)
        return web.Response(status=302, headers={"Location": "/inner"})

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with listen(app, "127.0.0.1", 0) as url, serving(model) as engine:
        await begin(engine)
        info = {"url": f"{url}/weights/", "files": digests(model)}
        await engine.post("/update_weights", {"update_info": info}, 400)
    assert reached == ["/weights/model.safetensors"]
