"""Records of sandboxes: owned by a lease, adopted by the next one, due when nobody owns them, counted when they end."""

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stream.errors import LeaseLostError
from stream.operator.control import release_worker
from stream.queue.sandboxes import (
    SandboxPlace,
    SandboxRecord,
    read_sandbox_counts,
    read_sandbox_places,
    read_sandboxes,
)

RECORD = SandboxRecord(stage="prompts", entry="", prompt="a", index=3, purpose="agent", spec="{}")


@pytest.fixture
def place(connection):
    return SandboxPlace(connection, "engine-1", "docker")


async def begin(place, worker, lease, name="s-1", life_s=100.0):
    record = SandboxRecord(stage=worker.name, entry=lease.id, prompt="a", index=3, purpose="agent", spec="{}")
    return await place.begin(worker, lease, name, record, life_s)


async def claimed(pipe, consumer="w", **terms):
    worker = pipe.stage("prompts", consumer, **terms)
    (lease,) = (await worker.claim(1)).leases
    return worker, lease


async def due(place, worker="reaper", grace_s=0.0):
    return set((await place.find_due(worker, grace_s, 30.0, 1.0)).due)


async def equation(place):
    counts = await read_sandbox_counts(place.connection)
    live = len(await place.records())
    assert counts.begun == counts.ended + live
    return counts.begun, counts.stopped, counts.reaped, counts.stray, live


async def test_a_sandbox_is_noted_before_it_is_created_and_counted_when_it_ends(pipe, place):
    await pipe.feed("a")
    worker, lease = await claimed(pipe)
    begun = await begin(place, worker, lease)
    (record,) = (await read_sandboxes(pipe.connection, "engine-1")).values()
    assert (record.owner, record.entry, record.index, record.begun_ms) == ("w", lease.id, 3, round(1000 * begun))
    assert record.until_ms - record.begun_ms == 100_000
    assert await read_sandbox_places(pipe.connection) == {"engine-1": "docker"}
    assert await due(place) == set()
    assert await place.end("s-1", "stopped")
    assert not await place.end("s-1", "stopped")  # a repeated script counts nothing
    assert await equation(place) == (1, 1, 0, 0, 0)


async def test_a_lost_lease_begins_nothing(pipe, place):
    await pipe.feed("a")
    worker, lease = await claimed(pipe)
    await worker.release(lease, "none", "")
    with pytest.raises(LeaseLostError):
        await begin(place, worker, lease)
    assert lease.lost
    assert await equation(place) == (0, 0, 0, 0, 0)


async def test_a_repeated_begin_notes_one_sandbox(pipe, place):
    await pipe.feed("a")
    worker, lease = await claimed(pipe)
    assert await begin(place, worker, lease) == await begin(place, worker, lease)
    assert await equation(place) == (1, 0, 0, 0, 1)


async def test_what_a_dead_worker_leaves_is_due_after_the_grace(pipe, place):
    await pipe.feed("a")
    worker, lease = await claimed(pipe, "w-host-77-x")
    await begin(place, worker, lease)
    await release_worker(pipe.connection, "host", 77, 5, "was killed")
    assert await due(place, grace_s=0.1) == set()
    await anyio.sleep(0.11)
    assert await due(place, grace_s=0.1) == {"s-1"}
    assert await due(place, grace_s=100) == {"s-1"}  # it stays due
    await place.end("s-1", "reaped")
    assert await equation(place) == (1, 0, 1, 0, 0)


async def test_an_expired_lease_counts_from_its_end_on(pipe, place):
    await pipe.feed("a")
    worker, lease = await claimed(pipe, lease_s=0.05)
    await begin(place, worker, lease)
    assert await due(place) == set()
    await anyio.sleep(0.2)
    assert await due(place, grace_s=0.12) == {"s-1"}


async def test_a_renewed_lease_keeps_its_sandbox(pipe, place):
    """A worker that was suspended wakes up before anybody has claimed its entry."""
    await pipe.feed("a")
    worker, lease = await claimed(pipe, lease_s=0.05)
    await begin(place, worker, lease)
    await anyio.sleep(0.06)
    assert await due(place, grace_s=10) == set()
    assert (await place.records())["s-1"].lost_ms is not None
    await pipe.connection.run_script("renew_leases", "prompts", "w", 30_000, lease.id)
    assert await due(place) == set()
    assert (await place.records())["s-1"].lost_ms is None


async def test_the_sandboxes_of_a_completed_entry_are_due(pipe, place):
    await pipe.feed("a")
    worker, lease = await claimed(pipe)
    await begin(place, worker, lease)
    await worker.complete(lease, "groups", pipe.group("a"))
    assert await due(place) == {"s-1"}


async def test_nobody_waits_for_a_successor_once_the_run_has_finished(pipe, place):
    await pipe.feed("a")
    worker, lease = await claimed(pipe)
    await begin(place, worker, lease)
    await worker.complete(lease, "groups", pipe.group("a"))
    assert await due(place, grace_s=100) == set()
    await pipe.connection.write_hash("meta", {"finished": "enough"})
    assert await due(place, grace_s=100) == {"s-1"}


async def test_a_sandbox_past_its_life_is_due_though_its_lease_is_held(pipe, place):
    await pipe.feed("a")
    worker, lease = await claimed(pipe)
    await begin(place, worker, lease, life_s=0.05)
    await anyio.sleep(0.06)
    assert await due(place, grace_s=100) == {"s-1"}


async def test_a_successor_adopts_and_fences_the_former_owner_off(pipe, place):
    await pipe.feed("a")
    worker, lease = await claimed(pipe, "w-host-77-x")
    await begin(place, worker, lease)
    await release_worker(pipe.connection, "host", 77, 5, "was killed")
    successor, its_lease = await claimed(pipe, "w-host-78-y")
    assert await place.adopt(worker, lease, "s-1") == 0
    assert await place.adopt(successor, its_lease, "s-1") == 2
    assert await place.adopt(successor, its_lease, "s-1") == 3  # a repeated script only raises the fence
    assert await due(place) == set()
    assert (await read_sandbox_counts(pipe.connection)).adopted == 1
    assert (await place.records())["s-1"].owner == "w-host-78-y"


async def test_what_is_due_cannot_be_adopted(pipe, place):
    await pipe.feed("a")
    worker, lease = await claimed(pipe, "w-host-77-x")
    await begin(place, worker, lease)
    await release_worker(pipe.connection, "host", 77, 5, "was killed")
    assert await due(place) == {"s-1"}
    successor, its_lease = await claimed(pipe, "v")
    assert await place.adopt(successor, its_lease, "s-1") == 0


async def test_an_entry_adopts_only_its_own_sandboxes(pipe, place):
    await pipe.feed("a", "b")
    worker = pipe.stage("prompts")
    one, other = (await worker.claim(2)).leases
    await begin(place, worker, one)
    assert await place.adopt(worker, other, "s-1") == 0


async def test_its_owner_leaves_a_sandbox_to_the_reaper(pipe, place):
    await pipe.feed("a")
    worker, lease = await claimed(pipe)
    await begin(place, worker, lease)
    await place.leave_to_reaper("s-1")
    assert await due(place, grace_s=100) == {"s-1"}
    await place.leave_to_reaper("unknown")
    assert await equation(place) == (1, 0, 0, 0, 1)


async def test_one_worker_reaps_a_place_until_it_stops_looking(pipe, place):
    assert (await place.find_due("one", 0, 30, 0.05)).is_active
    assert not (await place.find_due("other", 0, 30, 0.05)).is_active
    assert (await SandboxPlace(pipe.connection, "engine-2", "docker").find_due("other", 0, 30, 0.05)).is_active
    await anyio.sleep(0.06)
    assert (await place.find_due("other", 0, 30, 0.05)).is_active
    assert not (await place.find_due("one", 0, 30, 0.05)).is_active


async def test_what_cannot_be_removed_does_not_hold_up_the_others(pipe, place, monkeypatch):
    monkeypatch.setattr("stream.queue.sandboxes.MAX_DUE", 2)
    await pipe.feed("a")
    worker, lease = await claimed(pipe)
    for number in range(6):
        await begin(place, worker, lease, f"s-{number}")
        await place.leave_to_reaper(f"s-{number}")
    seen = [await due(place) for _ in range(3)]
    assert set().union(*seen) == {f"s-{number}" for number in range(6)}
    assert {record.tries for record in (await place.records()).values()} == {1}


async def test_the_place_of_a_dead_reaper_is_free_at_once(pipe, place):
    assert (await place.find_due("w-host-77-x", 0, 30, 60)).is_active
    await pipe.feed("a")
    worker, lease = await claimed(pipe)
    await begin(place, worker, lease)
    assert not (await place.find_due("other", 0, 30, 60)).is_active
    await release_worker(pipe.connection, "host", 77, 5, "was killed")
    assert (await place.find_due("other", 0, 30, 60)).is_active


async def test_a_stray_counts_as_begun_and_ended(pipe, place):
    await place.end("stray", "stray")
    await pipe.feed("a")
    worker, lease = await claimed(pipe)
    await begin(place, worker, lease)
    assert not await place.end("s-1", "stray")
    assert await equation(place) == (2, 0, 0, 1, 1)


async def test_a_restarted_server_extends_leases_before_it_calls_a_sandbox_lost(pipe, place):
    await pipe.feed("a")
    worker, lease = await claimed(pipe, lease_s=0.05)
    await begin(place, worker, lease)
    await pipe.connection.redis.hset(pipe.connection.key("server"), "id", "before")
    await anyio.sleep(0.06)
    assert await due(place) == set()


async def test_the_first_sandbox_of_a_place_wakes_its_reaper(pipe, place):
    await pipe.feed("a")
    worker, lease = await claimed(pipe)
    empty = await place.find_due("reaper", 0, 30, 1)
    assert empty.total == 0
    await begin(place, worker, lease)
    assert await pipe.connection.wait_for_change(empty.wake_id, 5) != empty.wake_id


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "stop", "kill", "complete", "adopt", "reap", "leave", "forget"]), st.integers(0, 2)
    ),
    max_size=40,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ACTIONS)
async def test_in_any_order_begun_is_ended_and_live(redis_url, actions):
    """Workers w0 to w2 begin, stop, die, complete, adopt; the reaper removes; the server forgets records."""
    import uuid

    from stream.connection.run_connection import connect
    from tests.conftest import Pipe

    async with connect(redis_url, f"test-{uuid.uuid4().hex}", reconnect_s=5.0) as connection:
        pipe, place = Pipe(connection), SandboxPlace(connection, "p", "x")
        await pipe.feed(*map(str, range(60)))
        workers = {n: pipe.stage("prompts", f"w-h-{n}-") for n in range(3)}
        names: dict[str, int] = {}
        for number, (action, n) in enumerate(actions):
            worker = workers[n]
            if not worker.leases:
                await worker.claim(1)
            lease = next(iter(worker.leases.values()), None)
            own = [name for name, owner in names.items() if owner == n]
            match action:
                case "begin" if lease is not None:
                    try:
                        await begin(place, worker, lease, f"s{number}")
                        names[f"s{number}"] = n
                    except LeaseLostError:
                        worker.leases.clear()
                case "stop" if own:
                    await place.end(own[0], "stopped")
                    del names[own[0]]
                case "kill":
                    await release_worker(connection, "h", n, 99, "was killed")
                    worker.leases.clear()
                case "complete" if lease is not None and not lease.lost:
                    await worker.complete(lease, "groups", pipe.group(lease.prompt_id))
                case "adopt" if names and lease is not None:
                    name = next(iter(names))
                    if await place.adopt(worker, lease, name):
                        names[name] = n
                case "reap":
                    for name in await due(place):
                        await place.end(name, "reaped")
                        names.pop(name, None)
                case "leave" if own:
                    await place.leave_to_reaper(own[0])
                case "forget" if names:
                    await connection.redis.hdel(connection.key("sandboxes:p"), name := next(iter(names)))
                    await connection.redis.hincrby(connection.key("sandbox_counts"), "begun", -1)
                    await place.end(name, "stray")
                    del names[name]
            await equation(place)
            assert set(await place.records()) == set(names)
        await connection.write_hash("meta", {"finished": "enough"})
        for n in range(3):
            await release_worker(connection, "h", n, 99, "was killed")
        for name in await due(place):
            await place.end(name, "reaped")
        assert (await equation(place))[-1] == 0
