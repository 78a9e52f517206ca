"""Weights published to scripted engines that fail half-way."""

from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from stream.errors import EngineRefusedError, EngineUnavailableError
from tests.cases.ports import free_port
from tests.scripted_engine.engine import ScriptedEngine
from workers.engine_api.discovery import EngineDiscovery
from workers.engine_api.http_server import listen
from workers.train.publishing.publisher import WeightPublisher
from workers.train.publishing.transport import PausedUpdate, SharedFolderTransfer

WHOLE = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]


def publisher_of(urls, patience_s, way=None) -> WeightPublisher:
    return WeightPublisher(
        EngineDiscovery(urls),
        way or PausedUpdate(SharedFolderTransfer()),
        retry_timeout_s=patience_s,
        update_timeout_s=20,
    )


def reply(_token_ids: list[int], _request) -> list[int]:
    return [1]


def dead_url() -> str:
    return f"http://127.0.0.1:{free_port()}"


async def test_a_push_goes_to_every_engine_in_order():
    async with ScriptedEngine(reply) as one, ScriptedEngine(reply, version="2") as other:
        publisher = publisher_of([one.url, other.url + "/"], 5)
        assert await publisher.engine_versions() == {one.url: None, other.url: 2}
        await publisher.push(Path("/weights/v3"), 3)
        assert await publisher.engine_versions() == {one.url: 3, other.url: 3}
        for engine in (one, other):
            assert list(engine.control_calls) == WHOLE
            assert engine.pushes == [("/weights/v3", "3")]
            assert not engine.is_paused


async def test_unreachable_engines_are_named_with_the_request(monkeypatch):
    monkeypatch.setattr("workers.train.publishing.engine_control._INFO_TIMEOUT_S", 0.2)
    gone = dead_url()
    async with ScriptedEngine(reply) as hung:
        hung.is_frozen = True
        with pytest.raises(EngineUnavailableError) as failed:
            await publisher_of([hung.url, gone], 0.1).push(Path("/w"), 1)
    assert f"{hung.url}/weight_info: no answer within 0.2 s" in str(failed.value)
    assert f"{gone}/weight_info: Cannot connect to host" in str(failed.value)


async def test_a_stop_ends_the_wait_for_an_engine_that_does_not_answer():
    stopping, gone = anyio.Event(), dead_url()
    publisher = WeightPublisher(
        EngineDiscovery([gone]),
        PausedUpdate(SharedFolderTransfer()),
        retry_timeout_s=3600,
        update_timeout_s=20,
        stopping=stopping,
    )
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:

            async def stop_after_a_failure() -> None:
                with capture_logs() as logs:
                    while not any(line["event"] == "engine.waiting" for line in logs):
                        await anyio.sleep(0.01)
                stopping.set()

            tasks.start_soon(stop_after_a_failure)
            with pytest.raises(EngineUnavailableError, match=f"no engine took version 1 before the stop: {gone}"):
                await publisher.push(Path("/w"), 1)


async def test_a_relative_folder_is_sent_as_an_absolute_one():
    async with ScriptedEngine(reply) as engine:
        await publisher_of([engine.url], 5).push(Path("weights/v1"), 1)
    assert engine.pushes == [(str(Path.cwd() / "weights/v1"), "1")]


@pytest.mark.parametrize("route", WHOLE)
async def test_a_failed_push_is_repeated_without_a_resume_in_between(route: str):
    async with ScriptedEngine(reply) as engine:
        engine.control_faults[route] = 1
        await publisher_of([engine.url], 5).push(Path("/w"), 1)
        assert list(engine.control_calls) == WHOLE[: WHOLE.index(route) + 1] + WHOLE
        assert (engine.version, engine.is_paused) == ("1", False)


async def test_a_failing_engine_is_resumed_and_the_other_engine_is_updated():
    async with ScriptedEngine(reply, version="0") as sick, ScriptedEngine(reply) as well:
        sick.control_faults["/update_weights"] = 1000
        publisher = publisher_of([sick.url, well.url, dead_url()], 30)
        await publisher.push(Path("/w"), 1)
        assert (sick.version, sick.is_paused, well.version) == ("0", False, "1")
        sick.control_faults.clear()
        await publisher.refresh(await publisher.outdated_engines(1), Path("/w"), 1)
        assert sick.pushes == [("/w", "1")]
        assert len(well.pushes) == 1  # it had them already


async def test_if_no_engine_takes_the_weights_all_are_named():
    urls = [dead_url(), dead_url()]
    with pytest.raises(EngineUnavailableError) as caught:
        await publisher_of(urls, 0.3).push(Path("/w"), 1)
    assert all(url in str(caught.value) for url in urls)


async def test_a_version_that_no_engine_took_is_never_announced():
    announced = []
    status = SimpleNamespace(started=lambda _value=None: announced.append(1))
    with pytest.raises(EngineUnavailableError):
        await publisher_of([dead_url()], 0.3).push(Path("/w"), 1, task_status=status)
    assert not announced


async def test_weights_that_every_engine_refuses_are_not_sent_again():
    async with ScriptedEngine(reply, version="0") as engine:
        engine.rejected_paths.add("/other")
        with pytest.raises(EngineRefusedError, match="not this model's weights"):
            await publisher_of([engine.url], 30).push(Path("/other"), 1)
        assert list(engine.control_calls) == [*WHOLE[:3], "/resume"]
        assert (engine.version, engine.is_paused) == ("0", False)


async def test_an_engine_started_without_a_backend_is_named_with_the_option():
    async with ScriptedEngine(reply) as bare, ScriptedEngine(reply) as other, ScriptedEngine(reply) as well:
        bare.transfer_config = None
        other.transfer_config = {"backend": "nccl"}
        with pytest.raises(
            EngineRefusedError, match=r"without --weight-transfer-config; .*'\{\"backend\": \"penstock\"\}'"
        ):
            await publisher_of([bare.url], 30).push(Path("/w"), 1)
        with pytest.raises(EngineRefusedError, match=r"with backend 'nccl'; .*penstock-vllm installed"):
            await publisher_of([other.url], 30).push(Path("/w"), 1)
        publisher = publisher_of([bare.url, other.url, well.url], 30)
        await publisher.push(Path("/w"), 1)
        assert (list(bare.control_calls), list(other.control_calls), well.version) == ([], [], "1")
        bare.transfer_config = {"backend": "penstock"}  # restarted
        assert {engine.url for engine in await publisher.outdated_engines(1)} == {bare.url, other.url}
        await publisher.refresh(await publisher.outdated_engines(1), Path("/w"), 1)
        assert bare.version == "1"


async def test_one_refusal_is_not_final_while_another_engine_is_unreachable():
    async with ScriptedEngine(reply) as bare:
        bare.transfer_config = None
        publisher = publisher_of([bare.url, gone := dead_url()], 0.3)
        for _ in range(2):
            with pytest.raises(EngineUnavailableError, match="without --weight-transfer-config"):
                await publisher.push(Path("/w"), 1)
            assert await publisher.engine_versions() == {bare.url: None, gone: None}  # found unreachable, and excluded


async def test_an_engine_without_control_routes_is_named_with_the_remedy():
    app = web.Application()
    async with listen(app, "127.0.0.1", 0) as url:
        with pytest.raises(EngineRefusedError, match="VLLM_SERVER_DEV_MODE=1"):
            await publisher_of([url], 30).push(Path("/w"), 1)


async def test_added_and_removed_engines_are_seen_at_the_next_push():
    async with ScriptedEngine(reply) as one, ScriptedEngine(reply) as other:
        roster = EngineDiscovery([one.url])
        publisher = WeightPublisher(
            roster, PausedUpdate(SharedFolderTransfer()), retry_timeout_s=5, update_timeout_s=20
        )
        await publisher.push(Path("/w"), 1)
        roster.urls = (other.url,)
        assert [engine.url for engine in await publisher.outdated_engines(1)] == [other.url]
        await publisher.push(Path("/w"), 2)
        assert (one.version, other.version) == ("1", "2")


async def test_a_run_without_engines_waits_and_then_names_the_setting_that_has_none():
    with pytest.raises(EngineUnavailableError, match=r"engine\.urls is empty; name one there"):
        await publisher_of([], 0.3).push(Path("/w"), 1)


async def test_a_foreign_weight_version_counts_as_outdated_and_is_logged_once():
    async with ScriptedEngine(reply, version="1") as one, ScriptedEngine(reply, version="theirs") as other:
        publisher = publisher_of([one.url, other.url], 5)
        with capture_logs() as lines:
            assert [engine.url for engine in await publisher.outdated_engines(1)] == [other.url]
            await publisher.refresh(await publisher.outdated_engines(1), Path("/w"), 1)
        assert await publisher.engine_versions() == {one.url: 1, other.url: 1}
    entries = [line for line in lines if line["event"] == "engine.foreign_weights"]
    assert [(line["url"], line["version"]) for line in entries] == [(other.url, "theirs")]


async def test_an_engine_that_stayed_paused_is_outdated():
    async with ScriptedEngine(reply) as engine:
        publisher = publisher_of([engine.url], 5)
        engine.control_faults["/resume"] = 1000
        await publisher_push_fails(publisher)
        assert (engine.version, engine.is_paused) == ("1", True)
        engine.control_faults.clear()
        await publisher.refresh(await publisher.outdated_engines(1), Path("/w"), 1)
        assert (engine.is_paused, await publisher.outdated_engines(1)) == (False, [])


async def test_an_engine_with_unknown_weights_stays_paused():
    async with ScriptedEngine(reply, version="0") as engine:
        engine.control_faults["/finish_weight_update"] = 1000
        await publisher_push_fails(publisher_of([engine.url], 0.5))
        assert engine.is_paused
        assert "/resume" not in engine.control_calls


async def publisher_push_fails(publisher: WeightPublisher) -> None:
    with pytest.raises(EngineUnavailableError):
        await publisher.push(Path("/w"), 1)


class HalfOpen:
    """Control routes of a vLLM with an update that was started and never finished."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.calls: list[str] = []

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/{fact}", self._fact)
        app.router.add_post("/{order}", self._order)
        return app

    async def _fact(self, _: web.Request) -> web.Response:
        return web.json_response({"world_size": self.workers, "weight_version": "default"})

    async def _order(self, http: web.Request) -> web.Response:
        self.calls.append(http.path)
        if http.path == "/start_weight_update":
            words = "start_weight_update called while a weight update is already active."
            return web.json_response({"error": {"message": words}}, status=500)
        return web.json_response({})


async def test_an_update_left_open_by_a_killed_trainer_is_continued():
    engine = HalfOpen(workers=1)
    async with listen(engine.application(), "127.0.0.1", 0) as url:
        await publisher_of([url], 5).push(Path("/w"), 1)
    assert engine.calls == WHOLE


async def test_an_open_update_of_several_workers_needs_a_restart():
    engine = HalfOpen(workers=2)
    async with listen(engine.application(), "127.0.0.1", 0) as url:
        with pytest.raises(EngineRefusedError, match=r"2 workers, .*; restart it"):
            await publisher_of([url], 0.3).push(Path("/w"), 1)
    assert "/update_weights" not in engine.calls


async def test_a_hanging_engine_does_not_delay_a_version_and_is_updated_later(monkeypatch):
    monkeypatch.setattr("workers.train.publishing.publisher._GRACE_S", 0.3)
    async with ScriptedEngine(reply, version="0") as hung, ScriptedEngine(reply, version="0") as well:
        hung.is_frozen = True
        publisher = publisher_of([hung.url, well.url], 30)
        async with anyio.create_task_group() as tasks:
            with anyio.fail_after(10):
                await tasks.start(publisher.push, Path("/w/1"), 1)
                await tasks.start(publisher.push, Path("/w/2"), 2)  # not attempted: it is busy with 1
            assert (hung.version, well.version) == ("0", "2")
            assert await publisher.engine_versions() == {hung.url: None, well.url: 2}
            assert await publisher.outdated_engines(2) == []
            hung.is_frozen = False
        assert hung.version == "1"  # started earlier, finished once unfrozen
        behind = await publisher.outdated_engines(2)
        assert [engine.url for engine in behind] == [hung.url]
        await publisher.refresh(behind, Path("/w/2"), 2)
        assert (hung.version, hung.is_paused) == ("2", False)
        assert [version for _, version in well.pushes] == ["1", "2"]


async def test_an_unreachable_engine_is_skipped_until_it_answers(monkeypatch):
    monkeypatch.setattr("workers.train.publishing.engine_control._INFO_TIMEOUT_S", 0.3)
    async with ScriptedEngine(reply, version="0") as hung, ScriptedEngine(reply, version="0") as well:
        publisher = publisher_of([hung.url, well.url], 30)
        hung.is_frozen = True
        assert [engine.url for engine in await publisher.outdated_engines(1)] == [well.url]
        await publisher.push(Path("/w/1"), 1)  # returns, though no task is left to update that engine
        hung.is_frozen = False
        assert [engine.url for engine in await publisher.outdated_engines(1)] == [hung.url]
        await publisher.push(Path("/w/2"), 2)
        assert (hung.version, well.version) == ("2", "2")
        assert "/pause" in hung.control_calls
        assert len(hung.pushes) == 1


async def test_the_only_engine_is_waited_for_even_if_unreachable(monkeypatch):
    monkeypatch.setattr("workers.train.publishing.engine_control._INFO_TIMEOUT_S", 0.3)
    async with ScriptedEngine(reply, version="0") as engine:
        publisher = publisher_of([engine.url], 30)
        engine.is_frozen = True
        assert await publisher.engine_versions() == {engine.url: None}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publisher.push, Path("/w"), 1)
            await anyio.sleep(0.2)
            engine.is_frozen = False
        assert engine.version == "1"


async def test_an_older_version_is_not_retried_after_a_newer_push(monkeypatch):
    monkeypatch.setattr("workers.train.publishing.publisher._GRACE_S", 0.2)
    async with ScriptedEngine(reply, version="0") as hung, ScriptedEngine(reply, version="0") as well:
        hung.is_frozen = True
        publisher = publisher_of([hung.url, well.url], 30)
        async with anyio.create_task_group() as tasks:
            with anyio.fail_after(10):
                for version in (1, 2):
                    await tasks.start(publisher.push, Path("/w"), version)
            hung.control_faults["/pause"] = 1
            hung.is_frozen = False
        assert list(hung.control_calls) == ["/pause", "/resume"]
        assert hung.version == "0"
