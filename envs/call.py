"""Run user code (environments, reward functions) with a deadline, without letting it block or end a worker.

Synchronous functions run in threads, coroutine functions on the event loop. A call returns an `Outcome` instead of
raising, so nothing that user code raises, `SystemExit` included, reaches the worker::

    outcome = await CallRunner(CapacityLimiter(8)).call(env.step, {"action": "left"}, timeout_s=5.0)
    match outcome:
        case Ok(value): ...
        case Failed(error): ...
        case TimedOut(timeout_s): ...
"""

import inspect
import math
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, Literal

import anyio
import structlog
from anyio import CancelScope, CapacityLimiter, to_thread

log = structlog.get_logger()

_MAX_TEXT = 2000
_MAX_CANCELLATIONS = 1000
"""Consecutive cancellations a coroutine may swallow before it is closed."""


@dataclass(frozen=True, slots=True)
class Ok:
    """The call returned."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """The call raised."""

    error: BaseException
    interim: bytes | None = None
    """The interim result of a job whose process ended (`envs.processes.child_main.report_interim`)."""


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The call passed its deadline. A thread cannot be stopped, so the function may still be running."""

    timeout_s: float
    interim: bytes | None = None
    """The interim result of a job whose process was killed."""


Outcome = Ok | Failed | TimedOut


class AbandonedThreads:
    """Counts threads that still run user code past their deadline.

    Each is replaced, so no call waits behind it, but it holds memory and keeps the process from exiting. A thread whose
    function returns late is no longer counted.
    """

    def __init__(self) -> None:
        self.count = 0
        """Threads abandoned and still running."""
        self._lock = Lock()
        self._changed: anyio.Event | None = None

    async def wait_for_count(self, count: int) -> None:
        """Wait until at least `count` threads are abandoned."""
        while self.count < count:
            self._changed = anyio.Event()
            await self._changed.wait()

    def add(self) -> None:
        """Count one more thread. Call it on the event loop."""
        with self._lock:
            self.count += 1
        if self._changed is not None:
            self._changed.set()

    def remove(self) -> None:
        """Count one thread less. Safe to call in any thread."""
        with self._lock:
            self.count -= 1


abandoned_threads = AbandonedThreads()
"""The counter of this process."""


class CallRunner:
    """Calls functions with deadlines.

    Args:
        limiter: bounds the threads for synchronous functions. Waiting for a thread does not count towards a deadline.
    """

    def __init__(self, limiter: CapacityLimiter) -> None:
        self._limiter = limiter
        self._unlimited = CapacityLimiter(math.inf)  # `_limiter` already counts each call

    async def call(self, function: Callable[..., Any], arguments: Mapping[str, Any], timeout_s: float) -> Outcome:
        """Call a function, or await a coroutine function. Never raises what the function raises."""
        if is_async(function):
            return await self._with_deadline(
                timeout_s, lambda scope: _await_outcome(partial(function, **arguments), scope)
            )
        async with self._limiter:
            return await self._with_deadline(timeout_s, lambda scope: self._in_thread(function, arguments, scope))

    async def _with_deadline(self, timeout_s: float, start: Callable[[CancelScope], Awaitable[Outcome]]) -> Outcome:
        with anyio.move_on_after(timeout_s) as scope:
            outcome = await start(scope)
            if not scope.cancel_called:  # user code may turn the cancellation into an error; that is a timeout too
                return outcome
        return TimedOut(timeout_s)

    async def _in_thread(
        self, function: Callable[..., Any], arguments: Mapping[str, Any], scope: CancelScope
    ) -> Outcome:
        thread = _ThreadCall(function, arguments)
        try:
            outcome = await to_thread.run_sync(thread.run, abandon_on_cancel=True, limiter=self._unlimited)
        except anyio.get_cancelled_exc_class():
            thread.abandon()
            raise
        if isinstance(outcome, Ok) and inspect.isawaitable(outcome.value):
            return await _await_outcome(lambda: outcome.value, scope)
        return outcome


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


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a call gives a coroutine: an `async def`, or an object whose `__call__` is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def filter_kwargs(function: Callable[..., Any], available: Mapping[str, Any]) -> dict[str, Any]:
    """Return the available keyword arguments that a function accepts: all if it has `**kwargs`, else those it names."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a C function without a signature
        return dict(available)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(available)
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {name: value for name, value in available.items() if name in named}


def describe_error(error: BaseException) -> str:
    """Return an exception's type and message as one text of at most 2,000 characters."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  (__str__ is user code too)
        text = "(its message cannot be read)"
    name = type(error).__name__
    return replace_surrogates(f"{name}: {text}" if text else name)[:_MAX_TEXT]


def describe_failure(outcome: Outcome) -> str:
    """Return why a call has no result, as text."""
    match outcome:
        case Failed(error):
            return describe_error(error)
        case TimedOut(timeout_s):
            return f"it did not return within {timeout_s:g} s"
        case Ok():
            return "it returned"


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which neither tokenizers nor records accept, by question marks."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


async def _await_outcome(start: Callable[[], Awaitable[Any]], scope: CancelScope) -> Outcome:
    try:
        return Ok(await _ForceClosable(start()))
    except anyio.get_cancelled_exc_class() as error:
        if scope.cancel_called or anyio.get_current_task().has_pending_cancellation():
            raise
        return Failed(error)  # user code cancelled itself
    except BaseException as error:  # noqa: BLE001  (user code: whatever it raises is an outcome)
        return Failed(error)


class _ForceClosable:
    """Awaits user code that may clean up when it is cancelled, but may not ignore cancellation forever.

    anyio cancels again at each await. Code that swallows `_MAX_CANCELLATIONS` of these in a row is closed where it is.
    """

    def __init__(self, awaitable: Awaitable[Any]) -> None:
        self._awaitable = awaitable

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._awaitable.__await__()
        advance: Callable[[], Any] = partial(next, steps)
        cancellations = 0
        while True:
            try:
                awaited = advance()
            except StopIteration as end:
                return end.value
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


def call_inline(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Outcome:
    """Call a function in this thread, without a deadline."""
    try:
        return Ok(function(**arguments))
    except BaseException as error:  # noqa: BLE001  (user code: whatever it raises is an outcome)
        return Failed(error)


class _ThreadCall:
    """One call in a thread, which may be abandoned while it runs."""

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        self._function = function
        self._arguments = arguments
        self._lock = Lock()
        self._state: Literal["queued", "running", "finished", "cancelled"] = "queued"
        self._abandoned_in: AbandonedThreads | None = None

    def run(self) -> Outcome:
        """Call the function, unless it was abandoned before it started. Runs in the thread."""
        with self._lock:
            if self._state == "cancelled":
                return TimedOut(0.0)
            self._state = "running"
        try:
            return call_inline(self._function, self._arguments)
        finally:
            with self._lock:
                self._state = "finished"
                if self._abandoned_in is not None:
                    self._abandoned_in.remove()

    def abandon(self) -> None:
        """Count this thread as abandoned until the function returns. Runs on the event loop.

        A function that has not started yet is not counted, and never called.
        """
        with self._lock:
            if self._state == "queued":
                self._state = "cancelled"
            elif self._state == "running":
                self._abandoned_in = abandoned_threads
                self._abandoned_in.add()
