"""Threads of user code: one runs all quick calls, they are used again, and a call that blocks holds up no other."""

import subprocess
import sys
import threading
import time
from contextvars import ContextVar

import anyio
import anyio.lowlevel
import pytest

from envs.call import CallRunner, Failed, Ok, TimedOut, threads

NAME: ContextVar[str] = ContextVar("name")


HANGS = """
import threading

import anyio

from envs.call import CallRunner, TimedOut

outcome = anyio.run(CallRunner(None).call, threading.Event().wait, {}, 0.1)
assert isinstance(outcome, TimedOut), outcome
"""
FORKS = """
import os

import anyio

from envs.call import CallRunner, Ok

for _ in range(2):
    assert anyio.run(CallRunner(None).call, os.getpid, {}, 20) == Ok(os.getpid())
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
        break
"""


async def outcomes_of(function, count: int) -> list[object]:
    """Call a function that often at the same time."""
    outcomes, runner = [], CallRunner(anyio.CapacityLimiter(count))

    async def call() -> None:
        outcomes.append(await runner.call(function, {}, 60))

    async with anyio.create_task_group() as tasks:
        for _ in range(count):
            tasks.start_soon(call)
    return outcomes


async def test_calls_of_one_moment_wake_one_thread(monkeypatch):
    monkeypatch.setattr(threads, "_PATIENCE_S", 60.0)  # no thread counts as slow, however busy the machine is
    assert len({outcome.value for outcome in await outcomes_of(threading.get_ident, 100)}) == 1


async def test_calls_that_block_each_have_a_thread_which_is_used_again():
    barrier, rounds = threading.Barrier(20), []

    def block() -> threading.Thread:
        barrier.wait()
        return threading.current_thread()

    with anyio.fail_after(60):
        for _ in range(2):
            waiting = set(threads._Worker.idle)
            rounds.append({outcome.value for outcome in await outcomes_of(block, 20)})
            while not rounds[-1] <= threads._Worker.idle:
                await anyio.sleep(0.001)
    assert [len(workers) for workers in rounds] == [20, 20]
    assert rounds[1] <= waiting


async def test_calls_that_go_to_another_thread_are_made_once(monkeypatch):
    monkeypatch.setattr(threads, "_IDLE_S", 0.2)
    release, made, runner = threading.Event(), [], CallRunner(anyio.CapacityLimiter(10))

    def block() -> threading.Thread:
        release.wait()
        return threading.current_thread()

    async def release_after(count: int) -> None:
        while len(made) < count:
            await anyio.sleep(0.001)
        release.set()

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            for _ in range(9):
                tasks.start_soon(runner.call, lambda: made.append(1), {}, 60)
            tasks.start_soon(release_after, 9)
            slow = (await runner.call(block, {}, 60)).value
        await anyio.to_thread.run_sync(slow.join)
    assert len(made) == 9


async def test_a_call_whose_thread_has_just_ended_goes_to_another(monkeypatch):
    monkeypatch.setattr(threads, "_IDLE_S", 0.01)
    ended = threads._Worker()
    ended.start()
    await anyio.to_thread.run_sync(ended.join)
    monkeypatch.setattr(threads._Worker, "choose", lambda: ended)
    with anyio.fail_after(60):
        assert await CallRunner(None).call(lambda: 7, {}, 60) == Ok(7)


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


async def test_the_same_thread_is_used_again():
    runner = CallRunner(anyio.CapacityLimiter(1))
    assert len({(await runner.call(threading.get_ident, {}, 60)).value for _ in range(10)}) == 1


async def test_a_call_sees_its_tasks_context_and_may_run_an_event_loop():
    NAME.set("prompt 7")
    runner = CallRunner(anyio.CapacityLimiter(1))
    assert await runner.call(NAME.get, {}, 60) == Ok("prompt 7")
    assert await runner.call(lambda: anyio.run(anyio.sleep, 0), {}, 60) == Ok(None)


async def test_an_idle_thread_ends_and_another_takes_its_place(monkeypatch):
    monkeypatch.setattr(threads, "_IDLE_S", 0.01)
    runner = CallRunner(anyio.CapacityLimiter(1))
    first = (await runner.call(threading.current_thread, {}, 60)).value
    with anyio.fail_after(60):
        await anyio.to_thread.run_sync(first.join)
    assert isinstance(await runner.call(threading.get_ident, {}, 60), Ok)


@pytest.mark.parametrize("program", [HANGS, FORKS], ids=["hangs", "forks"])
def test_the_process_of_a_call_ends(program):
    """A call that hangs does not keep it, and a fork, which has none of its parent's threads, starts its own."""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


async def test_calls_in_order_wake_one_thread_and_each_has_its_own_deadline():
    seen, limiter = [], anyio.CapacityLimiter(1)

    def note(number: int, seconds: float) -> int:
        time.sleep(seconds)
        seen.append((number, threading.get_ident(), limiter.statistics().borrowers))
        return number

    runner = CallRunner(limiter)
    calls = [(note, {"number": number, "seconds": 0.2}) for number in range(4)]
    outcomes = await runner.call_in_order(calls, 0.6)
    assert [outcome for outcome, _ in outcomes] == [Ok(number) for number in range(4)]
    assert all(seconds >= 0.2 for _, seconds in outcomes)
    assert [number for number, *_ in seen] == [0, 1, 2, 3]
    assert len({thread for _, thread, _ in seen}) == 1
    assert len({borrowers for *_, borrowers in seen}) == 1  # one wait for a thread, for all of them


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
