"""Calling code that is not ours: on no event loop of ours if it is synchronous, and never for longer than allowed.

What comes of a call is a value, so that nothing which an environment or a reward function raises, `SystemExit`
included, ends a worker.
"""

import inspect
import math
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import anyio
import structlog
from anyio import CancelScope, CapacityLimiter, to_thread

log = structlog.get_logger()

_MAX_TEXT = 2000
_MAX_CANCELLATIONS = 1000
"""Times in a row that a coroutine is told that it is cancelled before it is closed."""


@dataclass(frozen=True, slots=True)
class Ok:
    """It returned."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """It raised."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class TimedOut:
    """It was still running when its time was over. A thread cannot be stopped: it may be running even now."""

    timeout_s: float


Outcome = Ok | Failed | TimedOut


class AbandonedThreads:
    """The threads of this process that nobody waits for any more, while user code keeps them.

    Each was replaced by another one, so that nothing waits behind it; but it holds memory, and the process cannot end
    by itself. One that comes back after all is lost no longer.
    """

    def __init__(self) -> None:
        self.count = 0
        """Lost at this moment."""
        self._lock = Lock()
        self._changed: anyio.Event | None = None

    async def wait_for_count(self, count: int) -> None:
        """Wait until so many are lost."""
        while self.count < count:
            self._changed = anyio.Event()
            await self._changed.wait()

    def add(self) -> None:
        """Another one is lost. To be called on the event loop."""
        with self._lock:
            self.count += 1
        if self._changed is not None:
            self._changed.set()

    def remove(self) -> None:
        """One came back. To be called in any thread."""
        with self._lock:
            self.count -= 1


abandoned_threads = AbandonedThreads()
"""Of this process."""


class CallRunner:
    """Calls functions with deadlines; at most so many of the synchronous ones at once.

    Args:
        limiter: bounds the threads. Waiting for one is our load, and is not taken from a function's time.
    """

    def __init__(self, limiter: CapacityLimiter) -> None:
        self._limiter = limiter
        self._unlimited = CapacityLimiter(math.inf)  # for anyio, which would else count each call a second time

    async def call(self, function: Callable[..., Any], arguments: Mapping[str, Any], timeout_s: float) -> Outcome:
        """Call a function, or await a coroutine function."""
        if is_async(function):
            return await self._with_deadline(
                timeout_s, lambda scope: _await_outcome(partial(function, **arguments), scope)
            )
        async with self._limiter:
            return await self._with_deadline(timeout_s, lambda scope: self._in_thread(function, arguments, scope))

    async def _with_deadline(self, timeout_s: float, start: Callable[[CancelScope], Awaitable[Outcome]]) -> Outcome:
        with anyio.move_on_after(timeout_s) as scope:
            outcome = await start(scope)
            if not scope.cancel_called:  # code that turns being cancelled into an error of its own has overrun too
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
    """Lets so many calls begin in a second, evenly spaced.

    Args:
        per_second: calls; 0: as many as there are.
    """

    def __init__(self, per_second: float) -> None:
        self._interval_s = 1 / per_second if per_second else 0.0
        self._next_start = -math.inf

    async def acquire(self) -> None:
        """Wait for the next turn."""
        if self._interval_s:
            turn = max(anyio.current_time(), self._next_start)
            self._next_start = turn + self._interval_s
            await anyio.sleep_until(turn)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine: an `async def`, or an object whose `__call__` is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def filter_kwargs(function: Callable[..., Any], available: Mapping[str, Any]) -> dict[str, Any]:
    """Of what is offered, the keyword arguments that the function takes: all with `**kwargs`, else those it names."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C, without a signature
        return dict(available)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(available)
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {name: value for name, value in available.items() if name in named}


def describe_error(error: BaseException) -> str:
    """An exception as one text: its type and what it says, never longer than a page."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  (its __str__ is not ours either)
        text = "(its message cannot be read)"
    name = type(error).__name__
    return replace_surrogates(f"{name}: {text}" if text else name)[:_MAX_TEXT]


def describe_failure(outcome: Outcome) -> str:
    """Why a call came to nothing, in words."""
    match outcome:
        case Failed(error):
            return describe_error(error)
        case TimedOut(seconds):
            return f"it did not return within {seconds:g} s"
        case Ok():
            return "it returned"


def replace_surrogates(text: str) -> str:
    """The text without halves of surrogate pairs, which neither a tokenizer nor a record can hold."""
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
        return Failed(error)  # it was cancelled by its own doing, not by ours
    except BaseException as error:  # noqa: BLE001  (user code: whatever it raises is an outcome)
        return Failed(error)


class _ForceClosable:
    """An awaitable of user code that may clean up when it is cancelled, but not go on for ever.

    Who is cancelled is told so again at each await, by anyio. What has been told so often, without one await that came
    to its end, does not mean to stop: it is closed, wherever it stands.
    """

    def __init__(self, awaitable: Awaitable[Any]) -> None:
        self._awaitable = awaitable

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._awaitable.__await__()
        advance: Callable[[], Any] = partial(next, steps)
        cancellations = 0
        while True:
            try:
                waits_for = advance()
            except StopIteration as end:
                return end.value
            try:
                value = yield waits_for
            except GeneratorExit:
                _close(steps)
                raise
            except anyio.get_cancelled_exc_class() as error:
                cancellations += 1
                if cancellations > _MAX_CANCELLATIONS:
                    log.warning("call.cancellation_ignored", told=cancellations, where=_code_location(self._awaitable))
                    _close(steps)
                    raise
                advance = partial(_throw, steps, error)
            except BaseException as error:  # noqa: BLE001  (it is for the awaitable, whatever it is)
                advance = partial(_throw, steps, error)
            else:
                cancellations = 0
                advance = partial(_send, steps, value)


def _send(steps: Any, value: Any) -> Any:
    return next(steps) if value is None else steps.send(value)


def _throw(steps: Any, error: BaseException) -> Any:
    throw = getattr(steps, "throw", None)
    if throw is None:  # an iterator that is no generator
        raise error
    return throw(error)


def _close(steps: Any) -> None:
    """End it where it stands; what it raises or does against that is its own."""
    with suppress(BaseException):
        getattr(steps, "close", lambda: None)()


def _code_location(awaitable: Any) -> str:
    """The innermost of the coroutines that wait for one another, as file:line and name."""
    while inspect.iscoroutine(getattr(awaitable, "cr_await", None)):
        awaitable = awaitable.cr_await
    code, frame = getattr(awaitable, "cr_code", None), getattr(awaitable, "cr_frame", None)
    if code is None or frame is None:
        return type(awaitable).__name__
    return f"{code.co_filename}:{frame.f_lineno} {code.co_qualname}"


def call_inline(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Outcome:
    """Call it in this thread, for as long as it takes."""
    try:
        return Ok(function(**arguments))
    except BaseException as error:  # noqa: BLE001  (user code: whatever it raises is an outcome)
        return Failed(error)


class _ThreadCall:
    """One call in a thread, which may be given up while it runs."""

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        self._function = function
        self._arguments = arguments
        self._lock = Lock()
        self._finished = False
        self._abandoned_in: AbandonedThreads | None = None

    def run(self) -> Outcome:
        """Call the function; in the thread."""
        try:
            return call_inline(self._function, self._arguments)
        finally:
            with self._lock:
                self._finished = True
                if self._abandoned_in is not None:
                    self._abandoned_in.remove()

    def abandon(self) -> None:
        """Nobody waits for it any more; on the event loop."""
        with self._lock:
            if not self._finished:
                self._abandoned_in = abandoned_threads
                self._abandoned_in.add()
