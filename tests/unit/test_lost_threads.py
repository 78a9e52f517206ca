"""Threads that user code keeps: counted while they hang, forgotten when they come back."""

import threading

import anyio
import pytest

from envs import call
from envs.call import AbandonedThreads, CallRunner, Ok, TimedOut
from workers.runtime.recycling import WorkerRecycler
from workers.settings import Queue


@pytest.fixture
def lost(monkeypatch):
    """A count of the test's own: threads of other tests come back when they like."""
    monkeypatch.setattr(call, "abandoned_threads", found := AbandonedThreads())
    return found


async def test_a_thread_past_its_deadline_is_lost_until_it_comes_back(lost):
    release = threading.Event()
    caller = CallRunner(anyio.CapacityLimiter(1))
    assert isinstance(await caller.call(release.wait, {}, 0.01), TimedOut)
    assert lost.count == 1
    assert await caller.call(lambda: 7, {}, 5) == Ok(7)  # another thread has taken its place
    release.set()
    with anyio.fail_after(5):
        while lost.count:
            await anyio.sleep(0.001)


async def test_a_thread_whose_call_is_cancelled_is_lost_too(lost):
    release = threading.Event()
    caller = CallRunner(anyio.CapacityLimiter(1))
    with anyio.move_on_after(0.01):
        await caller.call(release.wait, {}, 60)
    assert lost.count == 1
    release.set()


async def test_an_async_call_past_its_deadline_loses_no_thread(lost):
    assert isinstance(await CallRunner(anyio.CapacityLimiter(1)).call(anyio.sleep, {"delay": 60}, 0.01), TimedOut)
    assert lost.count == 0


async def test_who_waits_for_a_number_hears_of_it_at_once_and_not_before():
    lost, heard = AbandonedThreads(), []

    async def wait(count: int) -> None:
        await lost.wait_for_count(count)
        heard.append((count, lost.count))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait, 2)
        await anyio.wait_all_tasks_blocked()
        lost.add()
        lost.remove()
        lost.add()
        await anyio.wait_all_tasks_blocked()
        assert heard == []
        lost.add()
    assert heard == [(2, 2)]


async def test_a_worker_that_takes_more_memory_than_it_may_is_asked_to_stop():
    stopping = anyio.Event()
    wear = WorkerRecycler(Queue(max_memory_mb=1), stopping)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wear.watch)
        with anyio.fail_after(5):
            await stopping.wait()
        tasks.cancel_scope.cancel()
    assert "queue.max_memory_mb" in wear.reason


async def test_a_worker_that_is_stopping_already_is_not_worn_out():
    stopping = anyio.Event()
    stopping.set()
    wear = WorkerRecycler(Queue(max_memory_mb=1), stopping)
    await wear._watch_memory()
    assert wear.reason == ""
