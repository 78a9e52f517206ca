"""Calls user code with a deadline."""

import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from traceback import FrameSummary, extract_tb
from typing import Any

import anyio
from anyio import CancelScope, CapacityLimiter, WouldBlock

from envs.call.causes import stack_of_thread
from envs.call.force_closable import ForceClosable
from envs.call.outcomes import Failed, Ok, Outcome, TimedOut
from envs.call.signatures import call_signature, is_async, is_awaitable
from envs.call.threads import ThreadCall
from envs.call.worker_threads import WorkerThreads


class CallRunner:
    """Calls functions with deadlines.

    Args:
        limiter: bounds the threads for synchronous functions. Waiting for a thread does not count towards a deadline.
    """

    def __init__(self, limiter: CapacityLimiter) -> None:
        self._limiter = limiter

    async def call(self, function: Callable[..., Any], arguments: Mapping[str, Any], timeout_s: float) -> Outcome:
        """Call a function, or await a coroutine function. Never raises what the function raises."""
        if is_async(function):
            return await self._with_deadline(
                timeout_s, lambda scope: _await_outcome(partial(function, **arguments), scope)
            )
        thread = ThreadCall(function, arguments)
        await self._acquire(thread)
        try:
            outcome = await self._in_thread(thread, timeout_s)
        finally:
            self._limiter.release_on_behalf_of(thread)
        if isinstance(outcome, TimedOut) and thread.thread_id is not None:
            return TimedOut(timeout_s, stack=stack_of_thread(thread.thread_id))
        return outcome

    async def _in_thread(self, thread: ThreadCall, timeout_s: float) -> Outcome:
        started = time.monotonic()
        outcome = await WorkerThreads.current().run(thread, timeout_s)
        if isinstance(outcome, Ok) and is_awaitable(outcome.value):
            return await self._with_deadline(
                timeout_s,
                lambda scope: _await_outcome(lambda: outcome.value, scope),
                spent_s=time.monotonic() - started,
            )
        return outcome

    async def _with_deadline(
        self, timeout_s: float, start: Callable[[CancelScope], Awaitable[Outcome]], *, spent_s: float = 0.0
    ) -> Outcome:
        stack: tuple[FrameSummary, ...] = ()
        with anyio.move_on_after(timeout_s - spent_s) as scope:
            try:
                outcome = await start(scope)
            except anyio.get_cancelled_exc_class() as error:
                stack = tuple(extract_tb(error.__traceback__))
                raise
            if not scope.cancel_called:  # user code may turn the cancellation into an error; that is a timeout too
                return outcome
        return TimedOut(timeout_s, stack=stack)

    async def _acquire(self, borrower: object) -> None:
        """Wait for a thread, unless one is free; `async with` would yield to the event loop each time."""
        try:
            self._limiter.acquire_on_behalf_of_nowait(borrower)
        except WouldBlock:
            await self._limiter.acquire_on_behalf_of(borrower)


def filter_kwargs(function: Callable[..., Any], available: Mapping[str, Any]) -> dict[str, Any]:
    """Return the available keyword arguments that a function accepts: all if it has `**kwargs`, else those it names."""
    signature = call_signature(function)
    if signature is None or signature.takes_any_keyword:
        return dict(available)
    return {name: value for name, value in available.items() if name in signature.keywords}


async def _await_outcome(start: Callable[[], Awaitable[Any]], scope: CancelScope) -> Outcome:
    try:
        return Ok(await ForceClosable(start()))
    except anyio.get_cancelled_exc_class() as error:
        if scope.cancel_called or anyio.get_current_task().has_pending_cancellation():
            raise
        return Failed(error)  # user code cancelled itself
    except BaseException as error:  # noqa: BLE001  (user code: whatever it raises is an outcome)
        return Failed(error)
