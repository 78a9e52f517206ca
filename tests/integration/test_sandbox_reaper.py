"""The reaper: what it removes, what it leaves, and when it looks again."""

import time
from contextlib import asynccontextmanager
from types import SimpleNamespace

import anyio
import pytest

from envs.sandboxes.contract import BEGUN_LABEL, RUN_LABEL, SandboxSpec
from stream.queue.sandboxes import SandboxPlace, SandboxRecord, read_sandbox_counts
from tests.cases.sandbox_place import reached, serve_place
from workers.rollout.sandbox_host import SandboxHost, SandboxOwner
from workers.rollout.sandbox_reaper import SandboxReaper
from workers.settings import SandboxSettings

SPEC = SandboxSpec(memory_mb=64, disk_mb=64)
CREATE_S = 1.0


@pytest.fixture
async def worker(pipe, tmp_path):
    """A reaper, its host, and the lease that owns what is created."""
    await pipe.feed("a")
    stage = pipe.stage("prompts")
    (lease,) = (await stage.claim(1)).leases
    with serve_place(tmp_path) as path:
        settings = SandboxSettings(
            provider="tests.cases.sandbox_place:PlaceProvider",
            address=str(path),
            create_timeout_s=CREATE_S,
            call_timeout_s=2,
            grace_s=0.1,
        )
        async with reached(path) as place, SandboxHost.open(settings, pipe.connection) as host:
            yield SimpleNamespace(
                place=place,
                host=host,
                owner=SandboxOwner(stage, lease),
                reaper=SandboxReaper(host, host.place, "reaper", 0.6),
            )


async def create(worker):
    return (await worker.host.create(worker.owner, 0, SPEC, "agent")).name


async def lose(worker):
    await worker.owner.stage.release(worker.owner.lease, "none", "")
    await worker.reaper.round()
    await anyio.sleep(0.15)


async def names(worker):
    return {listed.name for listed in await worker.place.list()}


async def counted(worker):
    counts, live = await read_sandbox_counts(worker.host.place.connection), await worker.host.place.records()
    assert counts.begun == counts.ended + len(live)
    return counts.stopped, counts.reaped, counts.stray, len(live)


async def test_what_is_owned_stays_and_what_is_lost_goes(worker):
    name = await create(worker)
    await worker.reaper.round()
    assert await names(worker) == {name}
    await lose(worker)
    await worker.reaper.round()
    assert await names(worker) == set()
    assert await counted(worker) == (0, 1, 0, 0)


async def test_a_creation_that_comes_late_is_waited_for(worker):
    """The engine answers that there is no such sandbox, and has it a moment later."""
    name = f"penstock-late-{worker.owner.lease.id}"
    record = SandboxRecord(stage="prompts", entry=worker.owner.lease.id, prompt="a", index=0, purpose="agent")
    begun = await worker.host.place.begin(worker.owner.stage, worker.owner.lease, name, record, 60)
    await lose(worker)
    await worker.reaper.round()
    assert await counted(worker) == (0, 0, 0, 1)
    await worker.place.create(name, SPEC, {RUN_LABEL: worker.host.run_id, BEGUN_LABEL: str(begun)})
    await worker.reaper.round()
    assert await names(worker) == set()
    assert await counted(worker) == (0, 1, 0, 0)


async def test_what_never_came_is_given_up_after_the_creations_deadline(worker):
    name = await create(worker)
    await worker.place.remove(name)
    await lose(worker)
    await worker.reaper.round()
    assert await counted(worker) == (0, 0, 0, 1)
    await anyio.sleep(2 * CREATE_S)
    await worker.reaper.round()
    assert await counted(worker) == (0, 1, 0, 0)


async def test_a_refused_removal_is_tried_again(worker):
    await create(worker)
    await lose(worker)
    await worker.place.ask(do="faults", faults={"refuse_removal": 1.0})
    await worker.reaper.round()
    assert await counted(worker) == (0, 0, 0, 1)
    await worker.place.ask(do="faults", faults={})
    await worker.reaper.round()
    assert await counted(worker) == (0, 1, 0, 0)


async def test_a_sandbox_without_a_record_is_stray_once_it_must_have_one(worker):
    labels = {RUN_LABEL: worker.host.run_id, BEGUN_LABEL: str(time.time())}
    await worker.place.create("old", SPEC, labels | {BEGUN_LABEL: str(time.time() - 10 * CREATE_S)})
    await worker.place.create("new", SPEC, labels)
    await worker.place.create("another run's", SPEC, labels | {RUN_LABEL: "other", BEGUN_LABEL: "0"})
    owned = await create(worker)
    assert await worker.reaper.sweep(int(1000 * time.time())) == 1
    assert await names(worker) == {"new", "another run's", owned}
    assert await counted(worker) == (0, 0, 1, 1)


async def test_places_whose_sandboxes_end_with_their_worker_need_only_their_records_deleted(worker, monkeypatch):
    """A machine with the provider `process` is gone for good."""
    elsewhere = SandboxPlace(worker.host.place.connection, "gone", worker.host.place.provider)
    record = SandboxRecord(stage="prompts", entry=worker.owner.lease.id, prompt="a", index=0, purpose="agent")
    await elsewhere.begin(worker.owner.stage, worker.owner.lease, "s", record, 60)
    await lose(worker)
    await elsewhere.find_due("anybody", 0, 30, 0.01)
    await anyio.sleep(0.02)
    await worker.reaper.sweep(0)
    assert len(await elsewhere.records()) == 1
    monkeypatch.setattr(type(worker.host.provider), "survives_worker", False)
    await worker.reaper.sweep(0)
    assert await elsewhere.records() == {}


async def test_the_end_of_a_run_waits_for_the_last_sandbox(worker):
    await create(worker)
    await worker.place.ask(do="faults", faults={"refuse_removal": 0.8})
    await worker.owner.stage.release(worker.owner.lease, "none", "")
    await worker.host.place.connection.write_hash("meta", {"finished": "enough"})
    with anyio.fail_after(20):
        await worker.reaper.finish()
    assert await names(worker) == set()


@asynccontextmanager
async def looking(reaper):
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reaper.run)
        yield
        tasks.cancel_scope.cancel()


async def test_it_sleeps_while_there_are_none_and_wakes_with_the_first(worker):
    calls = []
    find_due = worker.host.place.find_due

    async def noted(*args):
        calls.append(args)
        return await find_due(*args)

    worker.host.place.find_due = noted
    async with looking(worker.reaper):
        await anyio.sleep(1.0)
        assert len(calls) == 1
        await create(worker)
        await lose(worker)
        with anyio.fail_after(10):
            while await names(worker):
                await anyio.sleep(0.05)
    assert await counted(worker) == (0, 1, 0, 0)


async def test_it_goes_on_while_the_place_does_not_answer(worker):
    await create(worker)
    await worker.place.ask(do="faults", faults={"lose_reply": 1.0})
    async with looking(worker.reaper):
        await worker.owner.stage.release(worker.owner.lease, "none", "")
        await anyio.sleep(1.0)
        await worker.place.ask(do="faults", faults={})
        with anyio.fail_after(15):
            while (await counted(worker))[-1]:
                await anyio.sleep(0.1)
