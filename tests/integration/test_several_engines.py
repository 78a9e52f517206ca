"""Several engines: routing, ejection and recovery, adding and removing, and limits of requests."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from stream.errors import EngineUnavailableError
from stream.records import Span
from tests.cases import engines
from tests.scripted_engine.engine import ScriptedEngine
from tests.scripted_engine.routes import ScriptedRoutes
from workers.engine_api.discovery import EngineDiscovery
from workers.rollout.engine_client.client import EngineClient
from workers.rollout.engine_client.router import rank_engines
from workers.rollout.engine_client.sampling import SamplingOptions


def reply(token_ids: list[int], _request) -> list[int]:
    return [token_ids[-1] + 1, 2]


def sampling(group: str = "", completion: int = 0) -> SamplingOptions:
    return SamplingOptions(temperature=1.0, max_tokens=8, seed=4, group=group, completion=completion)


def port_of(engine: ScriptedEngine) -> int:
    return int(engine.url.rpartition(":")[2])


@asynccontextmanager
async def client_of(*reached, timeout_s: float = 30, reconnect_s: float = 20, **more) -> AsyncIterator:
    async with engines.client_of(*reached, timeout_s=timeout_s, reconnect_s=reconnect_s, **more) as client:
        await client.wait_until_ready()
        yield client


async def ask_all(client: EngineClient, n: int, **options) -> list:
    samples = []

    async def ask(i: int) -> None:
        samples.append(await client.sample([i], sampling(), **options))

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            for i in range(n):
                tasks.start_soon(ask, i)
    return samples


def events(lines, *names: str) -> list[tuple[str, str]]:
    return [(line["event"], line["url"]) for line in lines if line["event"] in names]


# Affinity


def asked(engine: ScriptedEngine) -> set[int]:
    return {request.token_ids[0] for request in engine.requests}


async def play(client: EngineClient, group: int, completions: int = 4, turns: int = 3) -> None:
    async def one(index: int) -> None:
        for turn in range(turns):
            await client.sample([group, index, turn], sampling(f"g{group}", index))

    async with anyio.create_task_group() as tasks:
        for index in range(completions):
            tasks.start_soon(one, index)


async def test_all_turns_of_all_completions_of_a_group_are_sampled_by_one_engine():
    async with (
        ScriptedEngine(reply, version="0", delay_s=0.01) as one,
        ScriptedEngine(reply, version="0", delay_s=0.01) as other,
        client_of(one, other) as client,
    ):
        for group in range(40):
            await play(client, group)
    assert len(asked(one)) + len(asked(other)) == 40
    assert min(len(asked(one)), len(asked(other))) > 8
    assert one.request_count + other.request_count == 40 * 4 * 3


async def test_many_groups_load_both_engines_equally_and_most_completions_stay():
    async with (
        ScriptedEngine(reply, version="0", delay_s=0.02) as one,
        ScriptedEngine(reply, version="0", delay_s=0.02) as other,
        client_of(one, other) as client,
        anyio.create_task_group() as tasks,
    ):
        for group in range(24):
            tasks.start_soon(play, client, group, 8)
    assert abs(one.request_count - other.request_count) < 0.25 * (one.request_count + other.request_count)
    at = Counter((tuple(r.token_ids[:2]), e.url) for e in (one, other) for r in e.requests)
    assert sum(count == 3 for count in at.values()) > 0.8 * 24 * 8


async def test_a_group_whose_engine_is_ejected_continues_at_another():
    async with (
        ScriptedEngine(reply, version="0") as one,
        ScriptedEngine(reply, version="0") as other,
        client_of(one, other) as client,
    ):
        group = next(n for n in range(99) if rank_engines(f"g{n}", (one.url, other.url))[0] == one.url)
        await play(client, group)
        assert other.request_count == 0
        await one.__aexit__(None, None, None)
        await play(client, group)
        assert other.request_count == 12


# Ejection and return


async def test_a_killed_engine_costs_no_request_and_its_ejection_and_recovery_are_logged_once():
    async with ScriptedEngine(reply, version="0", delay_s=0.3) as stays:
        dies = await ScriptedEngine(reply, version="0", delay_s=0.3).__aenter__()
        with capture_logs() as lines:
            async with client_of(stays, dies) as client:

                async def kill() -> None:
                    while not dies.running:
                        await anyio.sleep(0.01)
                    await dies.__aexit__(None, None, None)

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(kill)
                    assert len(await ask_all(client, 40)) == 40
                assert len(await ask_all(client, 10)) == 10
                async with ScriptedEngine(reply, version="0", port=port_of(dies)) as back:
                    with anyio.fail_after(10):
                        while not back.request_count:
                            await ask_all(client, 4)
    logged = events(lines, "engine.ejected", "engine.recovered")
    assert logged == [("engine.ejected", dies.url), ("engine.recovered", dies.url)]


async def test_a_recovered_engine_is_probed_and_waits_for_its_weights():
    async with (
        ScriptedEngine(reply, version="4") as stays,
        ScriptedEngine(reply, version="4") as first,
        client_of(stays, first) as client,
    ):
        await ask_all(client, 8, min_policy_version=4)
        await first.__aexit__(None, None, None)
        await ask_all(client, 8, min_policy_version=4)
        async with ScriptedEngine(reply, version=None, port=port_of(first)) as back:
            with anyio.fail_after(10):
                while not back.query_counts["/weight_info"] > 1:
                    await ask_all(client, 8, min_policy_version=4)
            assert back.query_counts["/version"] == 1
            assert back.request_count == 0
            back.version = "5"
            with anyio.fail_after(10):
                while not back.request_count:
                    assert all(
                        sample.spans[0].version >= 4 for sample in await ask_all(client, 8, min_policy_version=4)
                    )


async def test_an_engine_that_fails_every_request_is_ejected_despite_good_health_checks():
    async with ScriptedEngine(reply, version="0") as good, ScriptedEngine(reply, version="0") as bad:
        bad.faults = lambda *_: "500"
        with capture_logs() as lines:
            async with client_of(good, bad, attempts=4) as client:
                for _ in range(10):
                    assert len(await ask_all(client, 4)) == 4
                    await anyio.sleep(0.01)
                assert bad.request_count <= 8
        assert ("engine.ejected", bad.url) in events(lines, "engine.ejected")


async def test_an_engine_that_never_answers_delays_its_requests_once():
    async with ScriptedEngine(reply, version="0", delay_s=0.01) as good, ScriptedEngine(reply, version="0") as mute:
        mute.faults = lambda *_: "hang"
        async with client_of(good, mute, timeout_s=0.5) as client:
            assert len(await ask_all(client, 30)) == 30
            before = mute.request_count
            assert len(await ask_all(client, 30)) == 30
            assert mute.request_count == before <= 15


@asynccontextmanager
async def mute_proxy(engine: ScriptedEngine):
    """Forward traffic until `mute` is set; then accept connections and data without answering."""
    mute = anyio.Event()

    async def pump(source, sink) -> None:
        try:
            async for data in source:
                if mute.is_set():
                    await anyio.sleep_forever()
                await sink.send(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass

    async def handle(client) -> None:
        async with (
            client,
            await anyio.connect_tcp("127.0.0.1", port_of(engine)) as server,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(pump, client, server)
            await pump(server, client)
            tasks.cancel_scope.cancel()

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, handle)
        yield f"http://127.0.0.1:{port}", mute
        tasks.cancel_scope.cancel()


async def test_the_requests_of_an_engine_that_accepts_connections_but_never_answers_move(monkeypatch):
    monkeypatch.setattr("workers.rollout.engine_client.health.QUERY_TIMEOUT_S", 0.3)
    monkeypatch.setattr("workers.rollout.engine_client.health._POLL_INTERVAL_S", (0.05, 0.1))
    async with (
        ScriptedEngine(reply, version="0") as good,
        ScriptedEngine(reply, version="0", delay_s=1.0) as slow,
        mute_proxy(slow) as (url, mute),
    ):
        with capture_logs() as lines:
            async with client_of(good, url, timeout_s=300) as client:

                async def silence() -> None:
                    while slow.running < 3:
                        await anyio.sleep(0.01)
                    mute.set()

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(silence)
                    with anyio.fail_after(20):
                        assert len(await ask_all(client, 10)) == 10
        assert events(lines, "engine.ejected") == [("engine.ejected", url)]


async def test_a_pause_for_new_weights_is_not_a_failure(monkeypatch):
    monkeypatch.setattr("workers.rollout.engine_client.health._POLL_INTERVAL_S", (0.05, 0.1))
    async with ScriptedEngine(reply, version="0") as one, ScriptedEngine(reply, version="0") as other:
        for engine in (one, other):
            engine.is_paused = True
        with capture_logs() as lines:
            async with client_of(one, other, timeout_s=0.4, attempts=10) as client, anyio.create_task_group() as tasks:
                tasks.start_soon(ask_all, client, 8)
                await anyio.sleep(1.5)
                for engine in (one, other):
                    engine.is_paused = False
                    engine._resumed.set()
        assert events(lines, "engine.ejected") == []


# The discovery


async def test_an_added_engine_works_once_it_has_weights_and_a_removed_one_finishes_its_requests(tmp_path, monkeypatch):
    monkeypatch.setattr("workers.engine_api.discovery._LOOKUP_INTERVAL_S", 0.02)
    file = anyio.Path(tmp_path / "engines.txt")
    async with (
        ScriptedEngine(reply, version="3", delay_s=0.5) as old,
        ScriptedEngine(reply, version=None) as new,
        anyio.create_task_group() as tasks,
    ):
        await file.write_text(f"{old.url}\n")
        async with client_of(await EngineDiscovery.look_up([f"file:{file}"])) as client:
            samples = []

            async def ask() -> None:
                samples.append(await client.sample([1], sampling(), min_policy_version=3))

            await ask()
            await file.write_text(f"{old.url}\n{new.url}\n")
            with anyio.fail_after(5):
                while not new.query_counts["/version"]:
                    await anyio.sleep(0.02)
            for _ in range(6):
                tasks.start_soon(ask)
            await anyio.sleep(0.2)
            assert (old.running, new.request_count) == (6, 0)
            await file.write_text(f"{new.url}\n")
            new.version = "4"
            with anyio.fail_after(5):
                while len(samples) < 7:
                    await anyio.sleep(0.02)
            before = old.request_count
            for _ in range(6):
                await ask()
            assert (old.request_count, new.request_count) == (before, 6)
    assert {span for one in samples[1:7] for span in one.spans} == {Span(3, 0, 2)}
    assert {span for one in samples[7:] for span in one.spans} == {Span(4, 0, 2)}


async def test_requests_that_wait_for_an_engine_are_answered_by_one_that_is_added(tmp_path, monkeypatch):
    monkeypatch.setattr("workers.engine_api.discovery._LOOKUP_INTERVAL_S", 0.02)
    file = anyio.Path(tmp_path / "engines.txt")
    async with ScriptedEngine(reply, version="0") as gone:
        await file.write_text(f"{gone.url}\n")
    discovery = await EngineDiscovery.look_up([f"file:{file}"])
    async with (
        ScriptedEngine(reply, version="0") as new,
        EngineClient(discovery, request_timeout_s=5, max_attempts=3, unavailable_timeout_s=20) as client,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(ask_all, client, 12)
        await anyio.sleep(0.2)
        await file.write_text(f"{gone.url}\n{new.url}\n")
    assert new.request_count == 12


async def test_without_any_engine_the_error_names_the_remedy(tmp_path):
    discovery = await EngineDiscovery.look_up([f"file:{tmp_path / 'engines.txt'}"])
    with pytest.raises(EngineUnavailableError, match=r"engines\.txt \(engine\.urls\) has none; name one"):
        async with client_of(discovery, reconnect_s=0.5):
            pass


# Concurrency


def bound_requests(monkeypatch, lowest: int, highest: int) -> None:
    """Set the limits of requests in flight at one engine."""
    monkeypatch.setattr("workers.rollout.engine_client.health.MIN_CONCURRENCY", lowest)
    monkeypatch.setattr("workers.rollout.engine_client.health.MAX_CONCURRENCY", highest)


async def test_an_engine_gets_no_more_than_its_limit_and_waiting_requests_go_in_order(monkeypatch):
    bound_requests(monkeypatch, 2, 4)
    most = 0
    async with (
        ScriptedEngine(reply, version="0", delay_s=0.02) as engine,
        client_of(engine) as client,
        anyio.create_task_group() as tasks,
    ):

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, engine.running)
                await anyio.sleep(0.002)

        tasks.start_soon(watch)
        assert len(await ask_all(client, 40)) == 40
        tasks.cancel_scope.cancel()
    assert most == 4
    order = [request.token_ids[0] for request in engine.requests]
    assert all(abs(place - i) < 8 for place, i in enumerate(order))


async def test_a_request_cancelled_while_waiting_keeps_no_slot(monkeypatch):
    bound_requests(monkeypatch, 1, 2)
    async with (
        ScriptedEngine(reply, version="0", delay_s=0.05) as engine,
        client_of(engine) as client,
    ):
        async with anyio.create_task_group() as tasks:
            for i in range(20):
                tasks.start_soon(client.sample, [i], sampling())
            await anyio.sleep(0.12)
            tasks.cancel_scope.cancel()
        assert len(await ask_all(client, 6)) == 6


async def test_an_engine_with_a_queue_gets_fewer_requests(monkeypatch):
    bound_requests(monkeypatch, 2, 100)
    monkeypatch.setattr("workers.rollout.engine_client.health._POLL_INTERVAL_S", (0.02, 0.03))
    waited = []
    async with (
        ScriptedEngine(reply, version="0", delay_s=0.02, max_concurrency=10) as engine,
        client_of(engine) as client,
        anyio.create_task_group() as tasks,
    ):

        async def watch() -> None:
            while True:
                waited.append(engine.running - 10)
                await anyio.sleep(0.01)

        tasks.start_soon(watch)
        for _ in range(4):
            await ask_all(client, 250)
        tasks.cancel_scope.cancel()
    assert max(waited[:10]) > 80
    settled = waited[len(waited) // 2 :]
    assert sorted(settled)[len(settled) // 2] < 25
    assert sum(n >= 0 for n in settled) > 0.6 * len(settled), "the engine stays busy"


async def test_an_engine_without_metrics_gets_a_fixed_limit_which_is_logged_once(monkeypatch):
    bound_requests(monkeypatch, 2, 6)
    monkeypatch.setattr("workers.rollout.engine_client.health._POLL_INTERVAL_S", (0.01, 0.02))

    async def nothing(self, _):
        return web.Response(status=404)

    monkeypatch.setattr(ScriptedRoutes, "_metrics", nothing)
    async with ScriptedEngine(reply, version="0", delay_s=0.2) as engine:
        with capture_logs() as lines:
            async with client_of(engine) as client:
                await ask_all(client, 18)
    assert [(line["url"], line["limit"]) for line in lines if line["event"] == "engine.metrics_missing"] == [
        (engine.url, 6)
    ]


async def test_an_engine_whose_metrics_fail_once_is_polled_again(monkeypatch):
    bound_requests(monkeypatch, 2, 6)
    monkeypatch.setattr("workers.rollout.engine_client.health._POLL_INTERVAL_S", (0.01, 0.02))
    polls, figures = [], ScriptedRoutes._metrics

    async def sometimes(self, http):
        polls.append(len(polls) % 2 == 1)
        return await figures(self, http) if polls[-1] else web.Response(status=503)

    monkeypatch.setattr(ScriptedRoutes, "_metrics", sometimes)
    async with ScriptedEngine(reply, version="0", delay_s=0.2) as engine:
        with capture_logs() as lines:
            async with client_of(engine) as client:
                await ask_all(client, 18)
    assert sum(polls) > 2
    assert not [line for line in lines if line["event"] == "engine.metrics_missing"]


async def test_a_free_slot_goes_to_a_waiting_request_with_a_cached_prefix(monkeypatch):
    bound_requests(monkeypatch, 2, 4)
    async with (
        ScriptedEngine(reply, version="0", delay_s=0.1) as one,
        ScriptedEngine(reply, version="0", delay_s=0.1) as other,
        client_of(one, other) as client,
        anyio.create_task_group() as tasks,
    ):
        urls = (one.url, other.url)  # ports decide which engine a group prefers: use equal numbers of groups for each
        near = {url: [group for group in range(500) if rank_engines(f"g{group}", urls)[0] == url][:15] for url in urls}
        groups = sorted(near[one.url] + near[other.url])
        for group in groups:
            tasks.start_soon(play, client, group, 4, 2)
    at = Counter((request.token_ids[0], engine.url) for engine in (one, other) for request in engine.requests)
    together = sum(max(at[group, one.url], at[group, other.url]) for group in groups)
    assert together > 0.9 * 30 * 4 * 2  # 0.77 if slots go to the request that has waited longest
