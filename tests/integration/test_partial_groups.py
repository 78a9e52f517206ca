"""Saved completions of an unfinished group: written by the lease holder, deleted with the entry."""

import pytest

from stream.codec import encode
from stream.connection.run_connection import connect
from stream.operator.dead_letters import list_dead_letters, retry_dead_letters
from stream.records import Completion, Failure
from stream.validity import RolloutReason
from tests.cases.progress import completion_part, save

FAILED = Failure(reason=RolloutReason.ENGINE, detail="three tries")


def completion(pipe, index: int, failure: Failure | None = None) -> Completion:
    result = pipe.group("a").completions[0]
    result.index, result.failure = index, failure
    return result


async def finished(stage, lease):
    completions, _ = await stage.load_progress(lease)
    return completions


async def kept_keys(pipe) -> list[bytes]:
    return await pipe.connection.redis.keys(pipe.connection.key("*:partials:*"))


@pytest.fixture
async def worker(pipe):
    await pipe.feed("a")
    return pipe.stage("prompts", "first", infra_attempts=3)


async def claimed(stage):
    (lease,) = (await stage.claim(1)).leases
    return lease


async def expire(pipe, lease) -> None:
    """Expire the lease, as if its owner had stopped renewing it."""
    await pipe.connection.redis.zadd(pipe.connection.key("prompts:leases"), {lease.id: 0})


async def test_the_next_worker_loads_finished_completions_including_failed_ones(pipe, worker):
    lease = await claimed(worker)
    assert await finished(worker, lease) == []
    whole, failed = completion(pipe, 2), completion(pipe, 0, FAILED)
    for each in (whole, failed):
        await save(worker, lease, completion_part(each))
    await expire(pipe, lease)
    heir = pipe.stage("prompts", "second")
    again = await claimed(heir)
    assert (again.id, again.deaths) == (lease.id, 1)
    assert sorted(await finished(heir, again), key=lambda c: c.index) == [failed, whole]
    assert whole.rows[0].spans, "its tokens keep the version that sampled them"


async def test_saved_completions_survive_a_drain(pipe, worker):
    lease = await claimed(worker)
    await save(worker, lease, completion_part(completion(pipe, 1)))
    await worker.release(lease, "none", "")
    assert [c.index for c in await finished(worker, await claimed(worker))] == [1]


async def test_a_stale_attempt_leaves_no_saved_completions(pipe, worker):
    lease = await claimed(worker)
    await save(worker, lease, completion_part(completion(pipe, 1)))
    await worker.release(lease, "stale", "")
    assert await finished(worker, await claimed(worker)) == []


async def test_saving_without_the_lease_saves_nothing_and_marks_it_lost(pipe, worker):
    lease = await claimed(worker)
    await expire(pipe, lease)
    heir = pipe.stage("prompts", "second")
    again = await claimed(heir)
    await save(worker, lease, completion_part(completion(pipe, 0)))
    assert lease.lost
    assert worker.leases == {}
    assert await finished(heir, again) == []
    await heir.complete(again, "groups", pipe.group("a"))
    await save(worker, lease, completion_part(completion(pipe, 0)))
    assert await kept_keys(pipe) == []


async def settle(pipe, stage, lease) -> None:
    await stage.complete(lease, "groups", pipe.group("a"))


async def bury(_pipe, stage, lease) -> None:
    await stage.dead_letter(lease, "unreadable", "altered")


async def exhaust(_pipe, stage, lease) -> None:
    for _ in range(2):
        if await stage.release(lease, "data", "does not render"):
            return
        await stage.connection.redis.zadd(stage.connection.key("prompts:retries"), {lease.id: 0})
        lease = await claimed(stage)


async def outlive(pipe, stage, lease) -> None:
    while lease is not None:
        if lease.is_suspect:
            await stage.begin_alone(lease, "")
        await expire(pipe, lease)
        lease = next(iter((await stage.claim(1)).leases), None)


async def delete(pipe, stage, lease) -> None:
    await pipe.connection.redis.xdel(pipe.connection.key("prompts"), lease.id)
    await expire(pipe, lease)
    assert (await stage.claim(1)).leases == []


@pytest.mark.parametrize("end", [settle, bury, exhaust, outlive, delete])
async def test_ending_an_entry_deletes_its_saved_completions(pipe, worker, end):
    lease = await claimed(worker)
    await save(worker, lease, completion_part(completion(pipe, 0)))
    assert await kept_keys(pipe)
    await end(pipe, worker, lease)
    assert await kept_keys(pipe) == []
    assert await pipe.connection.redis.hgetall(pipe.connection.key("prompts:attempts")) == {}


async def test_a_retried_dead_letter_has_no_saved_completions(pipe, worker):
    lease = await claimed(worker)
    await save(worker, lease, completion_part(completion(pipe, 0)))
    await bury(pipe, worker, lease)
    await retry_dead_letters(pipe.connection, [(await list_dead_letters(pipe.connection))[0].id])
    assert await finished(worker, await claimed(worker)) == []


async def test_unreadable_saved_completions_are_skipped(pipe, worker):
    lease = await claimed(worker)
    sound = encode(completion(pipe, 1))
    await save(worker, lease, completion_part(completion(pipe, 3)))
    lease.has_progress = True
    await pipe.connection.redis.hset(
        pipe.connection.key(f"prompts:partials:{lease.id}"),
        mapping={
            b"0": b"junk",
            b"1": sound[:-1] + bytes([sound[-1] ^ 1]),
            b"2": sound,  # of another index
            b"nan": sound,
            b"\xff": encode(pipe.group("a")),
        },
    )
    assert [c.index for c in await finished(worker, lease)] == [3]


async def test_saving_a_completion_twice_saves_it_once(pipe, worker):
    """The second save repeats a call whose reply was lost."""
    lease = await claimed(worker)
    lease.has_progress = True
    for _ in range(2):
        await save(worker, lease, completion_part(completion(pipe, 1)))
    assert len(await finished(worker, lease)) == 1


async def test_saving_does_not_wait_for_a_server_without_memory(pipe, make_server, pipe_on, run_name):
    server = make_server().start()
    async with connect(server.url, run_name, reconnect_s=30.0) as connection:
        mine = pipe_on(connection)
        await mine.feed("a")
        stage = mine.stage("prompts", lease_s=0.3)
        lease = await claimed(stage)
        await connection.redis.config_set("maxmemory", "1")
        assert not await save(stage, lease, completion_part(completion(mine, 0)))
        await connection.redis.config_set("maxmemory", "0")
        lease.has_progress = True
        assert await finished(stage, lease) == []
        assert not lease.lost
        await stage.complete(lease, "groups", mine.group("a"))
