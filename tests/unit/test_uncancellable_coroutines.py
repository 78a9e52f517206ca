"""User coroutines that ignore cancellation do not extend the deadline."""

import asyncio
import gc
import math
from contextlib import suppress

import anyio
import anyio.lowlevel
import pytest
from anyio import CapacityLimiter

from envs.call import CallRunner, Failed, Ok, TimedOut

FOR_EVER = 3600


class Uncancellable:
    """Each way of ignoring a cancellation."""

    def __init__(self) -> None:
        self.ended = False

    async def ignores_cancellation(self):
        while True:
            with suppress(asyncio.CancelledError):
                await anyio.sleep(FOR_EVER)

    async def ignores_every_exception(self):
        while not self.ended:  # else it would run forever during garbage collection
            with suppress(BaseException):
                await asyncio.sleep(FOR_EVER)

    async def ignores_cancellation_deep_inside(self):
        try:
            await self.ignores_cancellation()
        finally:
            self.ended = True

    def ignores_cancellation_once_awaited(self):
        return self.ignores_cancellation()

    async def cleans_up(self):
        try:
            await asyncio.sleep(FOR_EVER)
        finally:
            for _ in range(10):
                try:
                    await anyio.lowlevel.checkpoint()
                except asyncio.CancelledError:
                    continue
            self.ended = True

    async def uses_its_own_deadlines(self):
        for _ in range(1500):
            with anyio.move_on_after(0):
                await anyio.sleep(FOR_EVER)
            await anyio.lowlevel.checkpoint()
        return 7


@pytest.fixture
def caller():
    return CallRunner(CapacityLimiter(math.inf))


@pytest.mark.parametrize(
    "how", ["ignores_cancellation", "ignores_cancellation_deep_inside", "ignores_cancellation_once_awaited"]
)
async def test_a_coroutine_that_ignores_one_cancellation_times_out(caller, how):
    with anyio.fail_after(10):
        assert isinstance(await caller.call(getattr(Uncancellable(), how), {}, 0.01), TimedOut)
        assert await caller.call(anyio.sleep, {"delay": 0}, 5) == Ok(None)


@pytest.mark.parametrize("answer", ["a value", "an error"])
async def test_what_a_coroutine_answers_after_its_deadline_is_a_timeout(caller, answer):
    async def answers_late():
        try:
            await asyncio.sleep(FOR_EVER)
        except asyncio.CancelledError:
            if answer == "an error":
                raise ValueError("too late") from None
            return answer

    assert await caller.call(answers_late, {}, 0.01) == TimedOut(0.01)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it ignores its end, too
async def test_a_coroutine_that_ignores_every_exception_times_out(caller):
    uncancellable = Uncancellable()
    with anyio.fail_after(10):
        assert isinstance(await caller.call(uncancellable.ignores_every_exception, {}, 0.01), TimedOut)
    uncancellable.ended = True
    gc.collect()


async def test_the_finally_block_of_a_closed_coroutine_runs(caller):
    uncancellable = Uncancellable()
    assert isinstance(await caller.call(uncancellable.ignores_cancellation_deep_inside, {}, 0.01), TimedOut)
    assert uncancellable.ended


async def test_a_coroutine_may_clean_up(caller):
    uncancellable = Uncancellable()
    assert isinstance(await caller.call(uncancellable.cleans_up, {}, 0.01), TimedOut)
    assert uncancellable.ended


async def test_a_coroutine_may_use_its_own_deadlines(caller):
    assert await caller.call(Uncancellable().uses_its_own_deadlines, {}, 60) == Ok(7)


async def test_cancelling_the_caller_ends_the_coroutine(caller):
    with anyio.fail_after(10), anyio.move_on_after(0.01):
        await caller.call(Uncancellable().ignores_cancellation, {}, 60)


async def test_values_and_errors_pass_through_unchanged(caller):
    async def raises():
        await anyio.lowlevel.checkpoint()
        raise SystemExit(3)

    outcome = await caller.call(raises, {}, 5)
    assert isinstance(outcome, Failed)
    assert isinstance(outcome.error, SystemExit)
    async with anyio.create_task_group() as tasks:
        event = asyncio.get_running_loop().create_future()
        tasks.start_soon(anyio.sleep, 0)
        event.set_result(5)
        assert await caller.call(lambda: event, {}, 5) == Ok(5)
