"""Calls user code with a deadline, at a limited rate.

A coroutine that ignores cancellation is closed by force (`ForceClosable`). `RateLimiter` spaces calls evenly.
"""

import inspect
import math
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from traceback import FrameSummary, extract_tb
from typing import Any

import anyio
import structlog
from anyio import CancelScope, CapacityLimiter, WouldBlock

from envs.call.call_memory import call_text, current_slot
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


log = structlog.get_logger()

_MAX_CANCELLATIONS = 1000
"""Consecutive cancellations a coroutine may swallow before it is closed."""


class ForceClosable:
    """Awaits user code that may clean up when it is cancelled, but may not ignore cancellation forever.

    While the awaited code runs, `envs.call.call_memory` says so.

    anyio cancels again at each await. Code that swallows `_MAX_CANCELLATIONS` of these in a row is closed where it is.
    """

    def __init__(self, awaitable: Awaitable[Any], text: bytes = b"") -> None:
        self._awaitable = awaitable
        self._text = text

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._awaitable.__await__()
        advance: Callable[[], Any] = partial(next, steps)
        cancellations = 0
        slot = current_slot()
        while True:
            if slot is not None:  # the event loop's thread has one slot: it says which code the loop is in now
                slot.begin(self._text)
            try:
                awaited = advance()
            except StopIteration as end:
                return end.value
            finally:
                if slot is not None:
                    slot.end()
            try:
                value = yield awaited
            except GeneratorExit:
                _close(steps)
                raise
            except anyio.get_cancelled_exc_class() as error:
                cancellations += 1
                if cancellations > _MAX_CANCELLATIONS:
                    log.warning(
                        "call.cancellation_ignored",
                        cancellations=cancellations,
                        where=_code_location(self._awaitable),
                    )
                    _close(steps)
                    raise
                advance = partial(_throw, steps, error)
            except BaseException as error:  # noqa: BLE001  (whatever it is, the awaitable handles it)
                advance = partial(_throw, steps, error)
            else:
                cancellations = 0
                advance = partial(_send, steps, value)


def _send(steps: Any, value: Any) -> Any:
    return next(steps) if value is None else steps.send(value)


def _throw(steps: Any, error: BaseException) -> Any:
    throw = getattr(steps, "throw", None)
    if throw is None:  # an iterator without generator methods
        raise error
    return throw(error)


def _close(steps: Any) -> None:
    """Close an awaitable's iterator; what user code raises meanwhile is ignored."""
    with suppress(BaseException):
        getattr(steps, "close", lambda: None)()


def _code_location(awaitable: Any) -> str:
    """Return where the innermost coroutine stands, as `file:line name`."""
    while inspect.iscoroutine(getattr(awaitable, "cr_await", None)):
        awaitable = awaitable.cr_await
    code, frame = getattr(awaitable, "cr_code", None), getattr(awaitable, "cr_frame", None)
    if code is None or frame is None:
        return type(awaitable).__name__
    return f"{code.co_filename}:{frame.f_lineno} {code.co_qualname}"


class RateLimiter:
    """Spaces calls evenly.

    Args:
        per_second: calls that may start in one second; 0: no limit.
    """

    def __init__(self, per_second: float) -> None:
        self._interval_s = 1 / per_second if per_second else 0.0
        self._next_start = -math.inf

    async def acquire(self) -> None:
        """Wait until the next call may start."""
        if self._interval_s:
            start = max(anyio.current_time(), self._next_start)
            self._next_start = start + self._interval_s
            await anyio.sleep_until(start)
