"""Weights to engines: scripted ones that fail half-way."""

import socket
from pathlib import Path

import pytest

from stream.errors import EngineRefusedError, EngineUnavailableError
from workers.fleet.roster import Roster
from workers.testing.scripted_engine import ScriptedEngine
from workers.train.publishing.files import Files
from workers.train.publishing.in_flight import InFlight
from workers.train.publishing.publisher import EnginePublisher

WHOLE = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]


def publisher_of(urls, patience_s, way=None) -> EnginePublisher:
    return EnginePublisher(Roster(urls), way or InFlight(Files()), patience_s=patience_s, update_timeout_s=20)


def reply(_token_ids: list[int], _request) -> list[int]:
    return [1]


def dead_url() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{found.getsockname()[1]}"


async def test_a_push_goes_to_every_engine_in_order():
    async with ScriptedEngine(reply) as one, ScriptedEngine(reply, version="2") as other:
        publisher = publisher_of([one.url, other.url + "/"], 5)
        assert await publisher.versions() == {one.url: None, other.url: 2}
        await publisher.push(Path("/weights/v3"), 3)
        assert await publisher.versions() == {one.url: 3, other.url: 3}
        for engine in (one, other):
            assert list(engine.orders) == WHOLE
            assert engine.pushes == [("/weights/v3", "3")]
            assert not engine.paused


async def test_a_relative_folder_is_sent_as_an_absolute_one():
    async with ScriptedEngine(reply) as engine:
        await publisher_of([engine.url], 5).push(Path("weights/v1"), 1)
    assert engine.pushes == [(str(Path.cwd() / "weights/v1"), "1")]


@pytest.mark.parametrize("route", WHOLE)
async def test_a_route_that_fails_once_is_begun_anew_without_a_resume_between(route: str):
    async with ScriptedEngine(reply) as engine:
        engine.order_faults[route] = 1
        await publisher_of([engine.url], 5).push(Path("/w"), 1)
        assert list(engine.orders) == WHOLE[: WHOLE.index(route) + 1] + WHOLE
        assert (engine.version, engine.paused) == ("1", False)


async def test_an_engine_that_keeps_failing_is_left_resumed_and_the_other_one_has_the_weights():
    async with ScriptedEngine(reply, version="0") as sick, ScriptedEngine(reply) as well:
        sick.order_faults["/update_weights"] = 1000
        publisher = publisher_of([sick.url, well.url, dead_url()], 30)
        await publisher.push(Path("/w"), 1)
        assert (sick.version, sick.paused, well.version) == ("0", False, "1")
        sick.order_faults.clear()
        await publisher.refresh(await publisher.behind(1), Path("/w"), 1)
        assert sick.pushes == [("/w", "1")]
        assert len(well.pushes) == 1  # it had them already


async def test_where_no_engine_takes_the_weights_all_are_named():
    urls = [dead_url(), dead_url()]
    with pytest.raises(EngineUnavailableError) as caught:
        await publisher_of(urls, 0.3).push(Path("/w"), 1)
    assert all(url in str(caught.value) for url in urls)


async def test_weights_that_every_engine_refuses_are_not_sent_again():
    async with ScriptedEngine(reply, version="0") as engine:
        engine.refused_paths.add("/other")
        with pytest.raises(EngineRefusedError, match="not this model's weights"):
            await publisher_of([engine.url], 30).push(Path("/other"), 1)
        assert list(engine.orders) == [*WHOLE[:3], "/resume"]
        assert (engine.version, engine.paused) == ("0", False)
