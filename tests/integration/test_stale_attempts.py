"""Versions of outstanding groups, and cancellation of stale attempts down to the engine."""

from contextlib import asynccontextmanager
from functools import partial

import anyio
import anyio.lowlevel
import pytest
from msgspec.structs import replace

from stream.codec import decode
from stream.operator.dead_letters import list_dead_letters, retry_dead_letters
from stream.operator.status import groups_in_flight, read_status
from stream.queue.entry_scan import read_payload
from stream.queue.feed import Feed
from stream.queue.stage import inflight_versions, watch_versions
from stream.records import Group, Prompt
from stream.trainer.ledger import Ledger
from stream.trainer.ledger_records import Dropped, Duplicate, Trained
from stream.trainer.trainer_lease import EndedGroup, TrainerLease
from tests.scripted_engine.engine import ScriptedEngine
from tests.soak.project import END, write_project
from workers.role.context import WorkerContext
from workers.rollout.worker import StaleCanceller, rollout, should_cancel
from workers.runs.status import queue_report


@pytest.fixture
async def trainer_lease(pipe):
    return await TrainerLease.acquire(pipe.connection, 30.0)


async def publish(trainer_lease, version):
    await trainer_lease.publish(version, "path", version, {})


# -- the version at the claim


async def test_a_claim_records_the_policy_version(pipe, trainer_lease):
    await pipe.feed("a", "b")
    rollout = pipe.stage("prompts")
    (first,) = (await rollout.claim(1)).leases
    await publish(trainer_lease, 7)
    (second,) = (await rollout.claim(1)).leases
    assert await inflight_versions(pipe.connection) == {"a": 0, "b": 7}  # no version is published yet
    assert (first.claimed_version, second.claimed_version) == (0, 7)


async def test_the_claimed_version_stays_through_the_stages(pipe, trainer_lease, tmp_path):
    await pipe.scored("a", "b")
    trainer = pipe.stage("scored", "trainer")
    a, b = (await trainer.claim(2)).leases
    assert await inflight_versions(pipe.connection) == {"a": 0, "b": 0}
    await trainer_lease.commit(trainer, [EndedGroup(a, Trained())], release_version=1)
    await trainer.release(b, "none", "")
    assert await inflight_versions(pipe.connection) == {"b": 0}


@pytest.mark.parametrize("kind", ["infra", "data", "none", "stale"])
async def test_a_released_prompt_gets_a_new_version_at_its_next_claim(pipe, trainer_lease, kind):
    await pipe.feed("a")
    rollout = pipe.stage("prompts", backoff_s=0.001)
    (lease,) = (await rollout.claim(1)).leases
    await rollout.release(lease, kind, "")
    assert await inflight_versions(pipe.connection) == {}
    await publish(trainer_lease, 3)
    with anyio.fail_after(5):
        while not (claim := await rollout.claim(1)).leases:
            await rollout.wait(claim)
    assert await inflight_versions(pipe.connection) == {"a": 3}


async def test_a_prompt_reclaimed_from_a_dead_worker_gets_a_new_version_and_wakes_the_trainer(pipe, trainer_lease):
    await pipe.feed("a")
    await pipe.stage("prompts", "dead", lease_s=0.05).claim(1)
    await publish(trainer_lease, 3)
    await anyio.sleep(0.06)
    waiting = await pipe.stage("scored", "trainer").claim(1)
    assert (await pipe.stage("prompts", "next").claim(1)).leases
    assert (await pipe.stage("scored", "trainer").claim(1)).wake_id != waiting.wake_id
    assert await inflight_versions(pipe.connection) == {"a": 3}


async def test_a_dead_letter_has_no_version_until_it_is_retried_and_claimed(pipe):
    await pipe.feed("a")
    rollout = pipe.stage("prompts")
    (lease,) = (await rollout.claim(1)).leases
    await rollout.dead_letter(lease, "unreadable", "altered")
    assert await inflight_versions(pipe.connection) == {}
    await retry_dead_letters(pipe.connection, [letter.id for letter in await list_dead_letters(pipe.connection)])
    assert await inflight_versions(pipe.connection) == {}
    await rollout.claim(1)
    assert await inflight_versions(pipe.connection) == {"a": 0}


async def test_a_duplicate_of_a_buffered_group_ends_nothing(pipe, trainer_lease):
    await pipe.scored("a")
    trainer = pipe.stage("scored", "trainer")
    ((_, fields),) = await pipe.connection.redis.xrange(pipe.connection.key("scored"))
    await pipe.connection.redis.xadd(pipe.connection.key("scored"), fields)
    first, twin = (await trainer.claim(2)).leases
    await trainer_lease.commit(trainer, [EndedGroup(twin, Duplicate(first.id))], release_version=1)
    assert await inflight_versions(pipe.connection) == {"a": 0}


async def test_groups_that_a_resumed_trainer_lacks_return_without_a_claimed_version(pipe, trainer_lease, tmp_path):
    await pipe.scored("a", "b")
    trainer = pipe.stage("scored", "trainer")
    a, _ = (await trainer.claim(2)).leases
    await trainer_lease.commit(trainer, [EndedGroup(a, Trained())], release_version=1)
    ledger = await anyio.to_thread.run_sync(Ledger, tmp_path / "ledger")
    await trainer_lease.recover(ledger)
    ledger.close()
    assert await inflight_versions(pipe.connection) == {"b": 0}
    assert len((await trainer.claim(2)).leases) == 2


@pytest.mark.parametrize(("in_step", "free"), [(False, 1), (True, 0)])
async def test_a_group_dropped_in_a_step_stays_outstanding_until_that_steps_version(pipe, trainer_lease, in_step, free):
    await pipe.scored("a")
    await pipe.feed("b", "c")
    trainer, rollout = pipe.stage("scored", "trainer"), pipe.stage("prompts", capacity=1)
    (lease,) = (await trainer.claim(1)).leases
    await trainer_lease.commit(trainer, [EndedGroup(lease, Dropped("advantage"), in_step)], release_version=1)
    assert (await pipe.prompt_counts())["dropped"] == 1
    taken = (await rollout.claim(2)).leases
    assert len(taken) == free
    await publish(trainer_lease, 1)
    assert len(taken + (await rollout.claim(2)).leases) == 1


# -- cancelled attempts


def test_an_attempt_is_cancelled_above_the_limit_and_at_most_twice():
    assert not should_cancel(claimed_version=3, version=4, max_staleness=1, cancellations=0)
    assert should_cancel(claimed_version=3, version=5, max_staleness=1, cancellations=0)
    assert should_cancel(claimed_version=3, version=5, max_staleness=1, cancellations=1)
    assert not should_cancel(claimed_version=3, version=5, max_staleness=1, cancellations=2)
    assert not should_cancel(claimed_version=0, version=-1, max_staleness=0, cancellations=0)


async def test_cancelled_prompts_are_claimed_first_and_count_their_cancellations(pipe):
    await pipe.feed("a", "b", "c")
    rollout = pipe.stage("prompts")
    for times in range(3):
        (lease,) = (await rollout.claim(1)).leases
        assert (lease.prompt_id, len(lease.cancelled_attempts_s)) == ("a", times)
        assert (lease.infra_failures, lease.data_failures) == (0, 0)
        assert all(0 <= seconds < 60 for seconds in lease.cancelled_attempts_s)
        await rollout.release(lease, "stale", "")
    status = await read_status(pipe.connection)
    assert status.counts["cancelled"] == queue_report("r", status).cancelled == 3
    assert status.prompt_counts["outstanding"] == 3  # a cancelled attempt does not end its prompt


async def test_watching_versions_yields_the_current_one_and_then_each_new_one(pipe, trainer_lease):
    await publish(trainer_lease, 4)
    heard = []
    with anyio.fail_after(5):
        async for version in watch_versions(pipe.connection):
            heard.append(version)
            if version == 7:
                break
            await publish(trainer_lease, version + 1)
    assert heard == [4, 5, 6, 7]


@asynccontextmanager
async def working(connection, tmp_path, late, delays):
    """Run a rollout worker in this process, with an engine whose n-th request takes `delays[n]` seconds."""
    settings = await anyio.to_thread.run_sync(write_project, tmp_path, 1, 1)
    taking = iter(delays)
    await Feed(connection, 10).put([Prompt(id="p", messages=[{"role": "user", "content": "5"}], group_size=2)], "", "1")
    async with ScriptedEngine(lambda prompt, _: [*prompt, END], version="0", delay_s=lambda _: next(taking)) as engine:
        settings = replace(
            settings,
            engine=replace(settings.engine, urls=(engine.url,)),
            pacing=replace(settings.pacing, stale_policy=late, max_staleness=0),
        )
        role = WorkerContext(settings=settings, connection=connection, consumer="rollout-1", stopping=anyio.Event())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rollout, role)
            yield engine
            role.stopping.set()


async def until(condition):
    with anyio.fail_after(20):
        while not condition():
            await anyio.sleep(0.005)


def begins(engine, count):
    return engine.request_count == count


async def the_group(connection):
    """Wait for the group that the worker completes; return it."""
    with anyio.fail_after(20):
        while not (result := await connection.redis.xrange(connection.key("groups"))):
            await anyio.sleep(0.005)
    ((entry_id, _),) = result
    return decode(await read_payload(connection, "groups", entry_id.decode()), Group)


async def test_a_stale_attempt_is_aborted_at_the_engine_twice_and_then_finished(connection, trainer_lease, tmp_path):
    await publish(trainer_lease, 0)
    async with working(connection, tmp_path, "cancel", [60.0] * 4 + [0.5] * 2) as engine:
        for version in (1, 2, 3):
            await until(lambda: engine.running == 2)
            engine.version = str(version)
            await publish(trainer_lease, version)
            await until(partial(begins, engine, 2 * min(version + 1, 3)))
        group = await the_group(connection)
    assert engine.aborted_count == 4
    assert (group.attempt, len(group.cancelled_attempts_s)) == (2, 2)
    assert [span.version for c in group.completions for row in c.rows for span in row.spans] == [3, 3]
    status = await read_status(connection)
    assert status.counts["cancelled"] == 2
    assert status.outstanding == 1


async def test_an_attempt_that_became_stale_before_its_start_is_cancelled(pipe):
    await pipe.feed("a")
    stage = pipe.stage("prompts")
    (lease,) = (await stage.claim(1)).leases
    late = StaleCanceller(stage, max_staleness=0)
    with lease.cancel_on_loss():
        late.cancel_if_stale(lease)
        await anyio.lowlevel.checkpoint()
    assert not lease.stale
    late.version = 1
    with lease.cancel_on_loss() as scope:
        late.cancel_if_stale(lease)
        await anyio.lowlevel.checkpoint()
    assert lease.stale
    assert scope.cancelled_caught


async def test_an_attempt_that_is_being_completed_is_not_cancelled(pipe):
    await pipe.feed("a")
    stage = pipe.stage("prompts")
    (lease,) = (await stage.claim(1)).leases
    with lease.cancel_on_loss(), stage.ending([lease]):
        lease.cancel_stale()
        await stage.complete(lease, "groups", pipe.group("a"))
    assert not lease.stale
    assert (await read_status(pipe.connection)).stages["groups"].depth == 1


@pytest.mark.parametrize("late", ["train", "wait"])
async def test_other_policies_cancel_nothing(connection, trainer_lease, tmp_path, late):
    await publish(trainer_lease, 0)
    async with working(connection, tmp_path, late, [0.5] * 2) as engine:
        await until(lambda: engine.running == 2)
        for version in range(1, 6):
            await publish(trainer_lease, version)
        group = await the_group(connection)
    assert (engine.request_count, engine.aborted_count) == (2, 0)
    assert group.cancelled_attempts_s == []


# -- what a worker reports meanwhile


async def test_an_attempt_is_reported_while_it_runs_and_not_after_its_group(connection, trainer_lease, tmp_path):
    await publish(trainer_lease, 0)
    async with working(connection, tmp_path, "train", [2.0] * 2) as engine:
        await until(lambda: engine.running == 2)
        with anyio.fail_after(3):
            while True:
                groups = groups_in_flight(await read_status(connection, with_in_flight=True))
                if groups and [each.activity for each in groups[0].completions] == ["sampling"] * 2:
                    break
                await anyio.sleep(0.02)
        (group,) = groups
        assert (group.prompt, group.stage, group.worker, group.total) == ("p", "prompts", "rollout-1", 2)
        assert {(each.engine, each.turn) for each in group.completions} == {(engine.url, 0)}
        await the_group(connection)
        assert groups_in_flight(await read_status(connection, with_in_flight=True)) == []


async def test_a_request_that_no_engine_takes_waits_for_one(connection, trainer_lease, tmp_path):
    await publish(trainer_lease, 3)
    async with working(connection, tmp_path, "train", [0.0] * 2) as engine:  # it serves version 0
        with anyio.fail_after(5):
            while True:
                groups = groups_in_flight(await read_status(connection, with_in_flight=True))
                activities = {each.activity for group in groups for each in group.completions}
                if activities == {"engine_wait"}:
                    break
                await anyio.sleep(0.02)
        assert engine.request_count == 0
        engine.version = "3"
        await the_group(connection)
