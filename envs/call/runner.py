"""Calls user code with a deadline."""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from traceback import FrameSummary, extract_tb
from typing import Any

import anyio
from anyio import CancelScope, CapacityLimiter, WouldBlock

from envs.call.call_memory import call_text
from envs.call.force_closable import ForceClosable
from envs.call.outcomes import Failed, Ok, Outcome, TimedOut
from envs.call.signatures import call_signature, is_async, is_awaitable
from envs.call.threads import Call, ThreadCalls, TimedOutcome


class CallRunner:
    """Calls functions with deadlines.

    Args:
        limiter: bounds the threads for synchronous functions. Waiting for a thread does not count towards a deadline.
            None: the caller bounds its concurrent calls itself.
    """

    def __init__(self, limiter: CapacityLimiter | None) -> None:
        self._limiter = limiter

    async def call(self, function: Callable[..., Any], arguments: Mapping[str, Any], timeout_s: float) -> Outcome:
        """Call a function, or await a coroutine function. Never raises what the function raises."""
        if is_async(function):
            text = call_text(function, arguments)
            return await self._with_deadline(
                timeout_s, lambda scope: _await_outcome(partial(function, **arguments), scope, text)
            )
        ((outcome, _),) = await self._in_thread([(function, arguments)], timeout_s)
        return outcome

    async def call_in_order(self, calls: Sequence[Call], timeout_s: float) -> list[TimedOutcome]:
        """Call functions one after the other, each with this deadline; synchronous ones share one thread, woken once.

        What is awaited, is awaited on the event loop. After a function that missed its deadline another thread goes on.

        Returns:
            The outcome of each call, and its wall time; that of the first one includes waiting for a thread.
        """
        outcomes: list[TimedOutcome] = []
        left = calls
        while left:
            function, arguments = left[0]
            if is_async(function):
                started = time.monotonic()
                outcome = await self.call(function, arguments, timeout_s)
                outcomes.append((outcome, time.monotonic() - started))
            else:
                outcomes += await self._in_thread(left, timeout_s)
            left = calls[len(outcomes) :]
        return outcomes

    async def _in_thread(self, calls: Sequence[Call], timeout_s: float) -> list[TimedOutcome]:
        """Return the outcomes of the first calls, of at least one."""
        thread = ThreadCalls(calls)
        if self._limiter is None:
            return await self._run(thread, timeout_s)
        try:
            self._limiter.acquire_on_behalf_of_nowait(thread)
        except WouldBlock:
            await self._limiter.acquire_on_behalf_of(thread)
        try:
            return await self._run(thread, timeout_s)
        finally:
            self._limiter.release_on_behalf_of(thread)

    async def _run(self, thread: ThreadCalls, timeout_s: float) -> list[TimedOutcome]:
        outcomes = await thread.run_in_thread(timeout_s)
        last, seconds = outcomes[-1]
        if type(last) is Ok and is_awaitable(last.value):
            awaitable = last.value
            text = call_text(*thread.calls[len(outcomes) - 1])
            awaited = await self._with_deadline(
                timeout_s, lambda scope: _await_outcome(lambda: awaitable, scope, text), spent_s=seconds
            )
            outcomes[-1] = awaited, time.monotonic() - thread.started_at
        return outcomes

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


def filter_kwargs(function: Callable[..., Any], available: Mapping[str, Any]) -> dict[str, Any]:
    """Return the available keyword arguments that a function accepts: all if it has `**kwargs`, else those it names."""
    signature = call_signature(function)
    if signature is None or signature.takes_any_keyword:
        return dict(available)
    return {name: value for name, value in available.items() if name in signature.keywords}


async def _await_outcome(start: Callable[[], Awaitable[Any]], scope: CancelScope, text: bytes) -> Outcome:
    try:
        return Ok(await ForceClosable(start(), text))
    except anyio.get_cancelled_exc_class() as error:
        if scope.cancel_called or anyio.get_current_task().has_pending_cancellation():
            raise
        return Failed(error)  # user code cancelled itself
    except BaseException as error:  # noqa: BLE001  (user code: whatever it raises is an outcome)
        return Failed(error)
