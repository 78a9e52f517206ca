"""Threads of user code: one runs all quick calls that are handed over together; each call that blocks has its own."""

import threading
import time
from contextvars import ContextVar

import anyio
import anyio.lowlevel
import pytest

from envs.call import CallRunner, Failed, Ok, TimedOut, worker_threads
from envs.call.threads import ThreadCalls

NAME: ContextVar[str] = ContextVar("name")


@pytest.fixture
def patient(monkeypatch):
    """No thread counts as slow, however busy the machine is."""
    monkeypatch.setattr(worker_threads, "_PATIENCE_S", 60.0)


async def outcomes_of(function, count: int) -> list[object]:
    """Call a function that often at the same time."""
    outcomes, runner = [], CallRunner(anyio.CapacityLimiter(count))

    async def call() -> None:
        outcomes.append(await runner.call(function, {}, 60))

    async with anyio.create_task_group() as tasks:
        for _ in range(count):
            tasks.start_soon(call)
    return outcomes


@pytest.mark.usefixtures("patient")
async def test_calls_that_are_handed_over_together_wake_one_thread():
    assert len({outcome.value for outcome in await outcomes_of(threading.get_ident, 100)}) == 1


@pytest.mark.usefixtures("patient")
async def test_a_check_for_slow_threads_leaves_calls_to_the_thread_that_is_about_to_be_woken():
    """On a busy loop the check for earlier calls may come just before it, and would wake a thread for each call."""
    threads, jobs = worker_threads.worker_threads(), [ThreadCalls([(threading.get_ident, {})]) for _ in range(20)]
    waiting = []

    async def check() -> None:
        waiting.append(len(threads._jobs))
        threads._relieve()

    async with anyio.create_task_group() as tasks:
        for job in jobs:
            tasks.start_soon(threads.run, job, 60.0)
        tasks.start_soon(check)
    assert waiting == [20]
    assert len({job.outcomes[0][0].value for job in jobs}) == 1


async def test_calls_that_block_each_have_a_thread():
    barrier = threading.Barrier(20)
    with anyio.fail_after(60):
        assert all(isinstance(outcome, Ok) for outcome in await outcomes_of(barrier.wait, 20))


async def test_a_quick_call_does_not_wait_for_one_that_blocks():
    started, release = threading.Event(), threading.Event()

    def block() -> None:
        started.set()
        release.wait()

    runner = CallRunner(anyio.CapacityLimiter(2))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(runner.call, block, {}, 60)
        await anyio.to_thread.run_sync(started.wait)
        assert await runner.call(lambda: 7, {}, 60) == Ok(7)
        release.set()


@pytest.mark.usefixtures("patient")
async def test_the_same_thread_is_used_again():
    runner = CallRunner(anyio.CapacityLimiter(1))
    assert len({(await runner.call(threading.get_ident, {}, 60)).value for _ in range(10)}) == 1


async def test_a_call_sees_its_tasks_context_and_may_run_an_event_loop():
    NAME.set("prompt 7")
    runner = CallRunner(anyio.CapacityLimiter(1))
    assert await runner.call(NAME.get, {}, 60) == Ok("prompt 7")
    assert await runner.call(lambda: anyio.run(anyio.sleep, 0), {}, 60) == Ok(None)


async def test_an_idle_thread_ends_and_another_takes_its_place(monkeypatch):
    monkeypatch.setattr(worker_threads, "_IDLE_S", 0.01)
    runner = CallRunner(anyio.CapacityLimiter(1))
    first = (await runner.call(threading.current_thread, {}, 60)).value
    with anyio.fail_after(60):
        await anyio.to_thread.run_sync(first.join)
    assert isinstance(await runner.call(threading.get_ident, {}, 60), Ok)


@pytest.mark.usefixtures("patient")
async def test_calls_in_order_wake_one_thread_and_each_has_its_own_deadline():
    seen = []

    def note(number: int, seconds: float) -> int:
        time.sleep(seconds)
        seen.append((number, threading.get_ident()))
        return number

    runner = CallRunner(anyio.CapacityLimiter(1))
    calls = [(note, {"number": number, "seconds": 0.2}) for number in range(4)]
    outcomes = await runner.call_in_order(calls, 0.6)
    assert [outcome for outcome, _ in outcomes] == [Ok(number) for number in range(4)]
    assert all(seconds >= 0.2 for _, seconds in outcomes)
    assert [number for number, _ in seen] == [0, 1, 2, 3]
    assert len({thread for _, thread in seen}) == 1


async def test_calls_after_a_late_one_or_an_awaitable_are_made_nevertheless():
    release, seen = threading.Event(), []

    async def wait() -> str:
        await anyio.lowlevel.checkpoint()
        seen.append("awaited")
        return "awaited"

    def fail() -> None:
        raise ValueError("no")

    calls = [(wait, {}), (release.wait, {}), (lambda: seen.append(1), {}), (fail, {}), (lambda: 7, {})]
    try:
        outcomes = [outcome for outcome, _ in await CallRunner(anyio.CapacityLimiter(1)).call_in_order(calls, 0.5)]
    finally:
        release.set()
    assert seen == ["awaited", 1]
    assert [type(outcome) for outcome in outcomes] == [Ok, TimedOut, Ok, Failed, Ok]
    assert (outcomes[0].value, outcomes[4].value) == ("awaited", 7)
