"""The loop of rollout workers and scorers on a real server: each way in which work can end."""

import json
from functools import partial

import anyio
import pytest
import structlog
from structlog.testing import capture_logs

from stream.causes import ErrorCause
from stream.codec import decode
from stream.errors import DataError, EngineUnavailableError
from stream.operator.control import read_last_error, release_worker
from stream.operator.dead_letters import dead_letter_causes, list_dead_letters
from stream.operator.status import read_status
from stream.queue.feed import Feed
from stream.queue.stage import RetryPolicy, Stage
from stream.records import Completion, Group, Prompt
from tests.cases.progress import completion_part, save
from workers.role.concurrency import SharedExclusiveLock
from workers.role.work_loop import work_loop

TERMS = RetryPolicy(lease_s=5.0, infra_attempts=3, data_attempts=2, backoff_s=0.02)


async def feed(connection, n, start=0):
    prompts = [Prompt(id=f"d:0:{i}", messages=[{"role": "user", "content": str(i)}]) for i in range(start, n)]
    await Feed(connection, 1000).put(prompts, str(start or ""), str(n))


async def pump_until(connection, work, done, at_once=4, policy=TERMS):
    """Run the work loop until `done()` accepts the run's status."""
    stage = Stage(connection, "prompts", "w1", policy)
    stopping = anyio.Event()
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:

            async def main():
                await work_loop(
                    stage, lambda lease, version: work(stage, lease), concurrency=at_once, stopping=stopping
                )

            tasks.start_soon(main)
            while not done(await read_status(connection)):
                await anyio.sleep(0.01)
            stopping.set()
    assert not stage.leases
    return stage


async def settle(stage, lease):
    await stage.complete(lease, "groups", Group(prompt=decode(lease.payload, Prompt), completions=[]))


async def test_every_entry_is_completed(connection):
    await feed(connection, 50)
    await pump_until(connection, settle, lambda status: status.stages["groups"].depth == 50)


async def test_each_log_line_of_an_entry_has_the_prompt_whose_work_it_is_about(connection):
    """Of entries worked on at the same time, in tasks and threads too."""
    log = structlog.get_logger()
    await feed(connection, 3)

    async def work(stage, lease):
        await anyio.sleep(0.02)
        await anyio.to_thread.run_sync(lambda: log.info("in.thread", expected=lease.prompt_id))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(log.ainfo, "in.task")
        await settle(stage, lease)

    with capture_logs(processors=[structlog.contextvars.merge_contextvars]) as lines:
        await pump_until(connection, work, lambda status: status.stages["groups"].depth == 3)
    found = [line for line in lines if line["event"] == "in.thread"]
    assert len(found) == 3
    assert all(line["prompt"] == line["expected"] for line in found)
    assert {line["prompt"] for line in lines if line["event"] == "in.task"} == {"d:0:0", "d:0:1", "d:0:2"}
    assert "prompt" not in structlog.contextvars.get_contextvars()


async def test_no_more_leases_are_held_than_the_limit(connection):
    await feed(connection, 20)
    most = 0

    async def work(stage, lease):
        nonlocal most
        most = max(most, len(stage.leases))
        await anyio.sleep(0.01)
        await settle(stage, lease)

    await pump_until(connection, work, lambda status: status.stages["groups"].depth == 20, at_once=3)
    assert most == 3


@pytest.mark.parametrize(("error", "reason"), [(RuntimeError("boom"), "infra"), (DataError("no such image"), "data")])
async def test_only_the_entry_that_keeps_failing_is_dead_lettered(connection, error, reason):
    await feed(connection, 5)

    async def work(stage, lease):
        if lease.prompt_id == "d:0:2":
            raise error
        await settle(stage, lease)

    await pump_until(connection, work, lambda status: status.dead == 1 and status.stages["groups"].depth == 4)
    (letter,) = await list_dead_letters(connection)
    assert (letter.prompt_id, letter.reason, letter.ends_prompt) == ("d:0:2", reason, True)
    assert str(error) in letter.error
    assert decode(letter.payload, Prompt).id == "d:0:2"


async def test_a_dead_letter_has_the_place_in_user_code(connection):
    await feed(connection, 1)

    async def work(stage, lease):
        json.loads("{")

    await pump_until(connection, work, lambda status: status.dead == 1)
    (letter,) = await list_dead_letters(connection)
    assert letter.error.startswith("JSONDecodeError: ")
    assert letter.cause.file.endswith("test_work_loop.py")
    assert letter.cause.traceback.splitlines()[-1].startswith("json.decoder.JSONDecodeError: ")
    last = await read_last_error(connection)
    assert (last.stage, last.cause) == ("prompts", letter.cause)
    assert str(last).endswith(f"UTC: {letter.error.splitlines()[0]}")


async def test_a_dead_letter_of_a_dead_worker_says_how_the_worker_ended(connection):
    await feed(connection, 1)
    stage = Stage(connection, "prompts", "rollout-host-1-77-abc", RetryPolicy(infra_attempts=1))
    (lease,) = (await stage.claim(1)).leases
    await stage.begin_alone(lease, "environment world")
    cause = ErrorCause(exception="Segmentation fault", source="rollout-0", file="/a/world.py", line=3)
    text = f"the last one, rollout-0, was killed by SIGSEGV\n{cause.render()}"
    (held,) = await release_worker(connection, "host-1", 77, 1, text)
    assert (held.prompt_id, held.deaths, held.is_charged, held.is_dead) == ("d:0:0", 1, True, True)
    (letter,) = await list_dead_letters(connection)
    assert letter.error.startswith("1 of its workers in a row died or stopped responding")
    assert "(environment world); the last one, rollout-0, was killed by SIGSEGV" in letter.error
    assert letter.cause == cause
    (told,) = (await dead_letter_causes(connection)).values()
    assert told.short_headline.startswith("prompt d:0:0, rollout-0: 1 of its workers in a row died or stopped")
    assert told.short_headline.endswith("Segmentation fault (world.py, line 3)")


async def test_an_unavailable_engine_counts_as_no_failure(connection):
    await feed(connection, 1)
    tries = 0

    async def work(stage, lease):
        nonlocal tries
        tries += 1
        if tries <= 6:
            raise EngineUnavailableError("nothing answers")
        await settle(stage, lease)

    await pump_until(connection, work, lambda status: status.stages["groups"].depth == 1)
    assert tries == 7


async def test_junk_is_dead_lettered_immediately(connection):
    await connection.write_hash("meta", {"data": "known"})
    await connection.redis.xadd(connection.key("prompts"), {"prompt": "d:0:0", "payload": b"junk"})

    async def work(stage, lease):
        decode(lease.payload, Prompt)

    await pump_until(connection, work, lambda status: status.dead == 1)
    (letter,) = await list_dead_letters(connection)
    assert (letter.reason, letter.ends_prompt) == ("unreadable", False)


async def test_after_two_deaths_an_entry_is_played_alone_so_no_other_one_dies_with_it(connection):
    """Four prompts of one worker died with it twice, and one of them kills its worker again."""
    await feed(connection, 4)
    policy = RetryPolicy(lease_s=0.2, infra_attempts=5, backoff_s=0.02)

    async def die_with(count):
        stage = Stage(connection, "prompts", "dead", policy)
        claim = await stage.claim(count)
        while len(stage.leases) < count:
            await stage.wait(claim)
            claim = await stage.claim(count)
        await anyio.sleep(policy.lease_s)

    await die_with(4)
    await die_with(4)
    await feed(connection, 12, start=4)
    running, beside, held, deaths = set(), {}, {}, 0

    async def work(stage, lease):
        nonlocal deaths
        running.add(lease.prompt_id)
        for each in running:
            beside.setdefault(each, set()).update(running - {each})
        held[lease.prompt_id] = len(stage.leases)
        await anyio.sleep(0.02)
        running.remove(lease.prompt_id)
        if lease.prompt_id == "d:0:2":
            deaths = lease.deaths + 1
            del stage.leases[lease.id]  # as if the worker had died: the lease is not renewed and expires
        else:
            await settle(stage, lease)

    await pump_until(
        connection, work, lambda status: status.stages["groups"].depth == 11 and status.dead == 1, policy=policy
    )
    (letter,) = await list_dead_letters(connection)
    assert (letter.prompt_id, letter.reason, letter.infra_failures, deaths) == ("d:0:2", "infra", 5, 7)
    suspects = {f"d:0:{i}" for i in range(4)}
    assert {name for name, others in beside.items() if not others} >= suspects
    assert {held[name] for name in suspects} == {1}  # an entry that waits for its turn would be charged for a death
    assert any(others for name, others in beside.items() if name not in suspects)  # the others run at the same time


async def test_a_suspect_that_waits_while_others_end_its_worker_is_not_charged(connection):
    """It is a mere neighbour then, however often that happens."""
    await feed(connection, 1)
    policy = RetryPolicy(infra_attempts=1)
    for deaths in range(8):
        worker = Stage(connection, "prompts", f"rollout-host-{deaths}-abc", policy)
        (lease,) = (await worker.claim(1)).leases
        assert (lease.deaths, lease.is_suspect, lease.infra_failures) == (min(deaths, 2), deaths >= 2, 0)
        held = await release_worker(connection, "host", deaths, policy.infra_attempts, "was killed")
        assert [(entry.deaths, entry.is_charged) for entry in held] == ([(deaths + 1, False)] if deaths < 2 else [])
    assert await list_dead_letters(connection) == []


@pytest.mark.parametrize("progress", ["partial", "failure"])
async def test_deaths_count_in_a_row_so_progress_resets_them(connection, progress):
    await feed(connection, 1)
    policy = RetryPolicy(backoff_s=0.01)
    for deaths in (0, 1, 2, 0, 1):
        worker = Stage(connection, "prompts", f"rollout-host-{deaths}-abc", policy)
        claim = await worker.claim(1)
        while not claim.leases:
            await worker.wait(claim)
            claim = await worker.claim(1)
        (lease,) = claim.leases
        assert lease.deaths == deaths
        if deaths == 2 and progress == "failure":
            await worker.release(lease, "infra", "no tool server")
            continue
        if deaths == 2:
            await save(worker, lease, completion_part(Completion(index=0)))
            await worker.release(lease, "none", "")
            continue
        await release_worker(connection, "host", deaths, 5, "was killed")


async def test_a_suspect_that_is_given_back_by_a_drain_stays_one(connection):
    await feed(connection, 1)
    for deaths in (0, 1):
        await Stage(connection, "prompts", f"rollout-host-{deaths}-abc", TERMS).claim(1)
        await release_worker(connection, "host", deaths, 5, "was killed")
    draining = Stage(connection, "prompts", "draining", TERMS)
    (lease,) = (await draining.claim(1)).leases
    await draining.begin_alone(lease, "environment world")
    await draining.release(lease, "none", "")
    (again,) = (await Stage(connection, "prompts", "rollout-host-9-abc", TERMS).claim(1)).leases
    assert again.is_suspect
    assert await release_worker(connection, "host", 9, 5, "was killed") == []  # it waited for its turn


async def test_a_suspect_that_waits_for_others_is_released_by_a_stop_request(connection):
    await feed(connection, 1)
    policy = RetryPolicy(lease_s=0.1)
    for _ in range(2):
        assert (await Stage(connection, "prompts", "dead", policy).claim(1)).leases
        await anyio.sleep(policy.lease_s)
    await feed(connection, 2, start=1)
    started = []

    async def work(stage, lease):
        started.append(lease.prompt_id)
        await anyio.sleep_forever()

    stage, stopping = Stage(connection, "prompts", "w1", policy), anyio.Event()
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            lock = SharedExclusiveLock()
            with lock.shared():
                loop = partial(work_loop, stage, partial(work, stage), concurrency=4, stopping=stopping)
                tasks.start_soon(partial(loop, lock=lock))
                while not stage.leases:
                    await anyio.sleep(0.01)
                stopping.set()
                await anyio.sleep(0.05)
                tasks.cancel_scope.cancel()
    assert started == []
    assert stage.leases == {}
    prompts = (await read_status(connection)).stages["prompts"]
    assert (prompts.depth, prompts.claimed) == (2, 0)


async def test_a_stop_request_releases_unfinished_work(connection):
    await feed(connection, 3)
    stage = Stage(connection, "prompts", "w1", TERMS)
    stopping = anyio.Event()

    async def forever(lease, version):
        await anyio.sleep_forever()

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: work_loop(stage, forever, concurrency=4, stopping=stopping))
            while len(stage.leases) < 3:
                await anyio.sleep(0.01)
            stopping.set()
            await anyio.sleep(0.05)
            tasks.cancel_scope.cancel()
    status = await read_status(connection)
    assert status.stages["prompts"].delayed == 3
    assert status.stages["prompts"].claimed == 0
    again = await Stage(connection, "prompts", "w2", TERMS).claim(10)
    assert [lease.infra_failures + lease.data_failures for lease in again.leases] == [0, 0, 0]


async def test_a_worker_exits_when_the_run_has_ended(connection):
    await connection.write_hash("meta", {"finished": "trained 3 steps"})
    stage = Stage(connection, "prompts", "w1", TERMS)

    async def never(lease, version):
        raise AssertionError

    with anyio.fail_after(3):
        await work_loop(stage, never, concurrency=4, stopping=anyio.Event())


async def test_a_lost_lease_cancels_the_work(connection):
    await feed(connection, 1)
    stage = Stage(connection, "prompts", "w1", RetryPolicy(lease_s=0.3))
    outcome = []

    async def slow(lease, version):
        try:
            await anyio.sleep(3)
        finally:
            outcome.append(lease.lost)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            stopping = anyio.Event()
            tasks.start_soon(lambda: work_loop(stage, slow, concurrency=1, stopping=stopping))
            while not stage.leases:
                await anyio.sleep(0.01)
            (entry,) = stage.leases
            await connection.redis.xclaim(connection.key("prompts"), "penstock", "thief", 0, [entry])
            while not outcome:
                await anyio.sleep(0.01)
            stopping.set()
    assert outcome == [True]
