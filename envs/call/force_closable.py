"""Awaits user code that may not cooperate with cancellation."""

import inspect
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import structlog

from envs.call.call_memory import current_slot

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
