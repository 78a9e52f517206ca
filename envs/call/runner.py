"""Calls user code with a deadline."""

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from traceback import FrameSummary, extract_tb
from typing import Any

import anyio
from anyio import CancelScope, CapacityLimiter, to_thread

from envs.call.causes import stack_of_thread
from envs.call.force_closable import ForceClosable
from envs.call.outcomes import Failed, Ok, Outcome, TimedOut
from envs.call.threads import ThreadCall


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
        thread = ThreadCall(function, arguments)
        async with self._limiter:
            outcome = await self._with_deadline(timeout_s, lambda scope: self._in_thread(thread, scope))
        if isinstance(outcome, TimedOut) and thread.thread_id is not None:
            return TimedOut(timeout_s, stack=stack_of_thread(thread.thread_id))
        return outcome

    async def _with_deadline(self, timeout_s: float, start: Callable[[CancelScope], Awaitable[Outcome]]) -> Outcome:
        stack: tuple[FrameSummary, ...] = ()
        with anyio.move_on_after(timeout_s) as scope:
            try:
                outcome = await start(scope)
            except anyio.get_cancelled_exc_class() as error:
                stack = tuple(extract_tb(error.__traceback__))
                raise
            if not scope.cancel_called:  # user code may turn the cancellation into an error; that is a timeout too
                return outcome
        return TimedOut(timeout_s, stack=stack)

    async def _in_thread(self, thread: ThreadCall, scope: CancelScope) -> Outcome:
        try:
            outcome = await to_thread.run_sync(thread.run, abandon_on_cancel=True, limiter=self._unlimited)
        except anyio.get_cancelled_exc_class():
            thread.abandon()
            raise
        if isinstance(outcome, Ok) and inspect.isawaitable(outcome.value):
            return await _await_outcome(lambda: outcome.value, scope)
        return outcome


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


async def _await_outcome(start: Callable[[], Awaitable[Any]], scope: CancelScope) -> Outcome:
    try:
        return Ok(await ForceClosable(start()))
    except anyio.get_cancelled_exc_class() as error:
        if scope.cancel_called or anyio.get_current_task().has_pending_cancellation():
            raise
        return Failed(error)  # user code cancelled itself
    except BaseException as error:  # noqa: BLE001  (user code: whatever it raises is an outcome)
        return Failed(error)
