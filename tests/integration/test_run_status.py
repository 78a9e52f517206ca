"""The run's status: complete, atomic and read-only."""

import os

import anyio
import anyio.to_thread
import pytest

from stream.connection.run_connection import connect
from stream.errors import PenstockError
from stream.operator.memory import report_memory
from stream.operator.status import groups_in_flight, read_status
from stream.queue.in_flight import CompletionInFlight, GroupInFlight
from stream.trainer.ledger_records import Trained
from stream.trainer.trainer_lease import EndedGroup, TrainerLease
from tests.cases.records import dumped
from workers.role.memory_watch import MemoryReports


async def busy_run(pipe, tmp_path) -> None:
    """Create one group in every state."""
    await pipe.scored("trained", "waiting")
    await pipe.rolled_out("unscored")
    await pipe.feed("claimed", "delayed", "dead", "unclaimed")
    trainer_lease = await TrainerLease.acquire(pipe.connection, 30.0)
    trainer = pipe.stage("scored", "trainer")
    (lease,) = (await trainer.claim(1)).leases
    await trainer_lease.commit(trainer, [EndedGroup(lease, Trained())], release_version=1)
    await trainer_lease.publish(0, tmp_path, 0, {"reward": 1.0})
    worker = pipe.stage("prompts", "worker", backoff_s=100.0)
    _claimed, delayed, dead = (await worker.claim(3)).leases
    await worker.release(delayed, "infra", "no tool server")
    await worker.dead_letter(dead, "unreadable", "altered")


async def test_the_status_has_every_state(pipe, tmp_path):
    await busy_run(pipe, tmp_path)
    status = await read_status(pipe.connection)
    prompts, groups, scored = (status.stages[name] for name in ("prompts", "groups", "scored"))
    assert (prompts.depth, prompts.claimed, prompts.delayed, prompts.lag) == (3, 1, 1, 1)
    assert prompts.consumers == {"worker": 1}
    assert (groups.depth, groups.lag, groups.consumers) == (1, 1, {})
    assert (scored.depth, scored.marked, scored.lag) == (2, 1, 1)
    assert status.outstanding == 4  # claimed, unscored, waiting, and trained for an unpublished version
    assert (status.unfinished, status.dead, status.version, status.metrics) == (5, 1, 0, {"reward": 1.0})
    assert status.prompt_counts == {"fed": 7, "trained": 1, "dropped": 0, "dead": 1, "outstanding": 5}
    assert 0 <= prompts.oldest_age_ms < 10_000


async def test_reading_the_status_changes_nothing(pipe, tmp_path, redis_url):
    await busy_run(pipe, tmp_path)
    before = await dumped(pipe.connection)
    async with connect(redis_url, pipe.connection.run, create=False) as visitor:
        for _ in range(3):
            await read_status(visitor)
    assert await dumped(pipe.connection) == before


async def test_an_unknown_run_is_an_error_and_is_not_created(redis_url):
    async with connect(redis_url, "nobody-ran-this", create=False) as visitor:
        with pytest.raises(PenstockError, match="nobody-ran-this"):
            await read_status(visitor)
        assert await dumped(visitor) == {}


async def test_rates_are_completed_entries_per_second(pipe):
    await pipe.rolled_out(*(f"p{i}" for i in range(10)))
    rate = (await read_status(pipe.connection)).stages["prompts"].rate
    assert 5 <= rate <= 10  # ten within this second, or within this and the previous one
    await anyio.sleep(2.0)
    assert (await read_status(pipe.connection)).stages["prompts"].rate < rate
    assert (await read_status(pipe.connection)).stages["groups"].rate == 0


def in_flight(lease, **fields) -> GroupInFlight:
    facts = {"entry": lease.id, "prompt": lease.prompt_id, "claimed_at": 5.0} | fields
    return GroupInFlight(**facts)


async def test_reports_of_workers_are_read_with_the_status_and_end_with_their_leases(pipe):
    await pipe.feed("a", "b", "c")
    stage, other = pipe.stage("prompts", "one", lease_s=0.3), pipe.stage("prompts", "two:\n}")
    held, ended = (await stage.claim(2)).leases
    (third,) = (await other.claim(1)).leases
    waiting = CompletionInFlight(
        index=1, turn=2, activity="tool", detail="add", since=9.0, engine="http://e:1", versions=[3, 4]
    )
    await stage.report_in_flight([in_flight(held, since=8.0), in_flight(ended)])
    await other.report_in_flight([in_flight(third, completions=[waiting])])
    await stage.complete(ended, "groups", pipe.group("b"))

    status = await read_status(pipe.connection, with_in_flight=True)
    first, last = groups_in_flight(status)
    assert (first.prompt, first.stage, first.worker, first.unchanged_since) == ("a", "prompts", "one", 8.0)
    assert (last.worker, last.completions) == ("two:\n}", [waiting])
    assert groups_in_flight(await read_status(pipe.connection)) == []

    await pipe.connection.redis.set(pipe.connection.key("in_flight:prompts:two:\n}"), "{not a report")
    await anyio.sleep(0.35)  # the report of the other worker expires
    assert groups_in_flight(await read_status(pipe.connection, with_in_flight=True)) == []


async def test_a_status_has_one_id_until_a_count_changes(pipe):
    await pipe.feed("a", "b")
    stage = pipe.stage("prompts")
    await stage.claim(1)
    before = await read_status(pipe.connection)
    await anyio.sleep(0.002)
    await pipe.connection.run_script("renew_leases", "prompts", "w", 60_000, *stage.leases)
    same = await read_status(pipe.connection)
    assert (same.status_id, same.now_ms) == (before.status_id, same.now_ms)
    assert same.now_ms > before.now_ms
    await stage.claim(1)
    assert (await read_status(pipe.connection)).status_id != before.status_id


async def test_two_runs_on_one_server_do_not_see_each_other(pipe, redis_url, pipe_on):
    await pipe.feed("a")
    async with connect(redis_url, f"{pipe.connection.run}-too") as other:
        stage = pipe_on(other).stage("prompts")
        assert (await stage.claim(1)).leases == []


async def test_the_memory_that_processes_hold_is_in_the_status_until_their_reports_are_old(pipe):
    await pipe.feed("p")
    reports = MemoryReports("host", lambda: {"train-0": os.getpid()})
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reports.run, pipe.connection)
        while not (machines := (await read_status(pipe.connection)).machines):
            await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()
    (process,) = machines[0].processes
    assert (process.name, process.bytes > 1 << 20) == ("train-0", True)
    await pipe.connection.redis.hset(pipe.connection.key("memory"), "gone", "1000 {}")
    await report_memory(pipe.connection, "host", machines[0])
    assert (await read_status(pipe.connection)).memory.keys() == {"host"}
