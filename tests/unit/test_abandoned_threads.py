"""Threads blocked by user code are counted while they hang, and no longer after they return."""

import threading

import anyio
import pytest

from envs.call import AbandonedThreads, CallRunner, Ok, TimedOut, threads
from envs.call.threads import ThreadCalls
from workers.role.watchdogs import WorkerRecycler
from workers.settings import QueueSettings


@pytest.fixture
def abandoned(monkeypatch):
    """A counter for this test only: threads of other tests return at any time."""
    monkeypatch.setattr(threads, "abandoned_threads", counter := AbandonedThreads())
    return counter


class Blocking:
    """A function that blocks its thread until the test releases it."""

    def __init__(self):
        self.started, self.release = threading.Event(), threading.Event()

    def __call__(self):
        self.started.set()
        self.release.wait()


async def test_a_thread_past_its_deadline_is_counted_until_it_returns(abandoned):
    runner, blocking, timeout_s = CallRunner(anyio.CapacityLimiter(1)), Blocking(), 0.01
    while not blocking.started.is_set():  # on a busy machine the deadline may pass before the thread starts
        assert abandoned.count == 0
        assert isinstance(await runner.call(blocking, {}, timeout_s), TimedOut)
        timeout_s *= 2
    assert abandoned.count == 1
    assert await runner.call(lambda: 7, {}, 60) == Ok(7)  # another thread has replaced it
    blocking.release.set()
    with anyio.fail_after(60):
        while abandoned.count:
            await anyio.sleep(0.001)


async def test_a_thread_whose_call_is_cancelled_is_counted(abandoned):
    blocking = Blocking()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(CallRunner(anyio.CapacityLimiter(1)).call, blocking, {}, 60)
        await anyio.to_thread.run_sync(blocking.started.wait)
        tasks.cancel_scope.cancel()
    assert abandoned.count == 1
    blocking.release.set()


async def test_a_call_abandoned_before_it_starts_is_neither_counted_nor_made(abandoned):
    blocking = Blocking()
    pending = ThreadCalls([(blocking, {})])
    pending.abandon()
    pending.run()
    assert (abandoned.count, blocking.started.is_set(), pending.outcomes) == (0, False, [])


async def test_an_async_call_past_its_deadline_blocks_no_thread(abandoned):
    assert isinstance(await CallRunner(anyio.CapacityLimiter(1)).call(anyio.sleep, {"delay": 60}, 0.01), TimedOut)
    assert abandoned.count == 0


async def test_waiting_for_a_count_ends_when_it_is_reached_and_not_before():
    abandoned, seen = AbandonedThreads(), []

    async def wait(count: int) -> None:
        await abandoned.wait_for_count(count)
        seen.append((count, abandoned.count))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait, 2)
        await anyio.wait_all_tasks_blocked()
        abandoned.add()
        abandoned.remove()
        abandoned.add()
        await anyio.wait_all_tasks_blocked()
        assert seen == []
        abandoned.add()
    assert seen == [(2, 2)]


async def test_a_worker_above_its_memory_limit_is_asked_to_stop():
    stopping = anyio.Event()
    recycler = WorkerRecycler(QueueSettings(max_memory_mb=1), stopping)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(recycler.watch)
        with anyio.fail_after(60):
            await stopping.wait()
        tasks.cancel_scope.cancel()
    assert "queue.max_memory_mb" in recycler.reason


async def test_a_worker_that_is_stopping_already_is_not_recycled():
    stopping = anyio.Event()
    stopping.set()
    recycler = WorkerRecycler(QueueSettings(max_memory_mb=1), stopping)
    await recycler._watch_memory()
    assert recycler.reason == ""
