"""Entry points of long-running processes: event loop, signals, drain timeout, exit code."""

import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import TypeVar

import anyio
import structlog

from stream.disk_space import no_room
from stream.errors import (
    DataError,
    FencedError,
    PenstockError,
    ReferenceNotFoundError,
    RunFailedError,
    RunMismatchError,
    SettingsError,
)
from workers.role.context import find_cause
from workers.role.exit_codes import ExitCode

log = structlog.get_logger()

_PERMANENT_ERRORS = (SettingsError, ReferenceNotFoundError, RunMismatchError, DataError, FencedError, RunFailedError)

T = TypeVar("T")


def run_async(main: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine function, on uvloop if installed."""
    return anyio.run(main, backend_options={"use_uvloop": find_spec("uvloop") is not None})


def run_to_exit_code(main: Callable[[], Awaitable[ExitCode]]) -> ExitCode:
    """Run a coroutine function; an expected error becomes one line on stderr and an exit code."""
    try:
        return run_async(main)
    except BaseExceptionGroup as group:
        error = _find_penstock_error(group)
        if error is None:
            raise
        return report_error(error)
    except PenstockError as error:
        return report_error(error)
    except OSError as error:
        if (full := _as_full_disk(error)) is None:
            raise
        return report_error(full)


def _as_full_disk(error: BaseException) -> PenstockError | None:
    """Return the error of a file that found no room on its disk as one line; None if it is another error."""
    if not isinstance(error, OSError) or not (why := no_room(error)):
        return None
    return PenstockError(f"{error.filename or 'a file'} could not be written: {why}; make room on its disk")


def report_error(error: PenstockError, code: ExitCode | None = None) -> ExitCode:
    """Log an error and print it in the form that the supervisor quotes. Returns `code`, or the error's own.

    If an exception in user code is behind it, its place and traceback follow (`stream.causes.ErrorCause`).
    """
    cause = find_cause(error)
    log.error("role.failed", kind=type(error).__name__, error=str(error))
    with suppress(OSError):  # a full disk must not turn the error into another one
        print(f"error: {error}", file=sys.stderr, flush=True)  # noqa: T201
        if cause is not None:
            print(cause.render(), file=sys.stderr, flush=True)  # noqa: T201
    default = ExitCode.PERMANENT if isinstance(error, _PERMANENT_ERRORS) else ExitCode.FAILURE
    return default if code is None else code


async def watch_signals(stopping: anyio.Event, scope: anyio.CancelScope) -> None:
    """Start a drain at the first SIGTERM or SIGINT, and end it at the second.

    Args:
        stopping: set by the first signal.
        scope: cancelled by the second.
    """
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        is_first = True  # `stopping` may be set already, by `penstock stop`
        async for received in signals:
            if not is_first:
                scope.cancel()
                return
            is_first = False
            log.info("drain.started", signal=received.name)
            stopping.set()


async def limit_drain(stopping: anyio.Event, timeout_s: float, scope: anyio.CancelScope) -> None:
    """Cancel `scope` when a drain takes longer than `timeout_s`."""
    await stopping.wait()
    await anyio.sleep(timeout_s)
    scope.cancel()


@contextmanager
def unwrap_single_error() -> Iterator[None]:
    """Raise an expected error itself if it is the only one in the exception groups that task groups put around it."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        if not isinstance(error, PenstockError):
            raise
        raise error from None


def _find_penstock_error(group: BaseExceptionGroup[BaseException]) -> PenstockError | None:
    """Return the first expected error in a group of exceptions."""
    for error in group.exceptions:
        found = _find_penstock_error(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(found, PenstockError):
            return found
        if found is not None and (full := _as_full_disk(found)) is not None:
            return full
    return None
