"""How a call of user code ended, as a value and in words, with the place in user code where it raised or hangs."""

import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from traceback import FrameSummary
from types import FrameType
from typing import Any, Final

from msgspec import Struct

from stream.causes import MAX_TRACEBACK, ErrorCause

_MAX_TEXT = 2000


class Ok(Struct, frozen=True):
    """The call returned."""

    value: Any


class Failed(Struct, frozen=True):
    """The call raised."""

    error: BaseException
    interim: bytes | None = None
    """The interim result of a job whose process ended (`envs.sandboxes.pools.child_main.report_interim`)."""


class TimedOut(Struct, frozen=True):
    """The call passed its deadline. No thread can be stopped, so a function in a thread may still be running."""

    timeout_s: float
    interim: bytes | None = None
    """The interim result of a job whose process was killed."""
    stack: tuple[FrameSummary, ...] = ()
    """The function's stack when the deadline passed, outermost call first; empty if it is unknown."""


Outcome = Ok | Failed | TimedOut


def call_inline(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Outcome:
    """Call a function in this thread, without a deadline."""
    try:
        return Ok(function(**arguments))
    except BaseException as error:  # noqa: BLE001  (user code: whatever it raises is an outcome)
        return Failed(error)


def describe_error(error: BaseException) -> str:
    """Return an exception's type and message as one text of at most 2,000 characters."""
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001  (__str__ is user code too, and may even exit)
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
    """Return a plain string without lone surrogates, which neither tokenizers nor records accept; they become `?`.

    Libraries return subclasses of `str` (numpy, lxml, Beautiful Soup, MarkupSafe), which records do not accept either.
    """
    text = str.__str__(text)
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


_ROOT: Final = Path(__file__).resolve().parents[2]
_OURS: Final = tuple(f"{_ROOT / name}/" for name in ("penstock", "stream", "envs", "workers"))
_USER_LIKE: Final = tuple(f"{_ROOT / 'envs' / name}/" for name in ("adapters", "builtin", "remote"))
"""Penstock's own environments and reward functions are shown as a user's code."""
_LIBRARIES: Final = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib"))
_COMPILED: Final = (".pyx", ".pxi", ".pxd")
"""Endings of files in Cython's frames, whose paths are relative to a package's sources instead of absolute."""
_PLUMBING: Final = ("/anyio/", "/asyncio/", "/threading.py", "<frozen", "/uvloop/", "/concurrent/futures/")
"""Parts of the paths of frames that lie between Penstock and user code."""


def error_cause(error: BaseException, source: str = "") -> ErrorCause:
    """Return an exception as a cause, with a traceback that begins in user code.

    Args:
        error: the exception.
        source: what was called, for people.
    """
    error = _innermost(error)
    frames = _user_frames(traceback.extract_tb(error.__traceback__))
    return _cause(describe_error(error), frames, source, _exception_line(error))


def outcome_cause(outcome: Outcome, source: str = "") -> ErrorCause | None:
    """Return why a call has no result; None if it returned. The cause has no file and line if the place is unknown."""
    match outcome:
        case Ok():
            return None
        case Failed(error):
            return error_cause(error, source)
        case TimedOut(_, _, stack):
            what = describe_failure(outcome)
            return _cause(f"TimeoutError: {what}", _user_frames(stack), source, f"TimeoutError: {what}\n")


def stack_of_thread(ident: int) -> tuple[traceback.FrameSummary, ...]:
    """Return the stack of a running thread of this process; empty if it has ended."""
    frame: FrameType | None = sys._current_frames().get(ident)  # noqa: SLF001  (documented, and has no public name)
    return tuple(traceback.extract_stack(frame)) if frame is not None else ()


def is_library(file: str) -> bool:
    """Return whether a frame's file belongs to Python or to an installed package, compiled ones included."""
    return file.startswith(_LIBRARIES) or file.endswith(_COMPILED)


def _innermost(error: BaseException) -> BaseException:
    """Unwrap an exception: take the first of a group, and the cause of one that Penstock itself raised from another."""
    while True:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif error.__cause__ is not None and not _user_frames(traceback.extract_tb(error.__traceback__)):
            error = error.__cause__
        else:
            return error


def _user_frames(frames: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return the frames from the first one in user code on, without Penstock's own; empty if none is in user code."""
    first = next((i for i, frame in enumerate(frames) if not _is_plumbing(frame.filename)), len(frames))
    return [frame for frame in frames[first:] if not _is_ours(frame.filename)]


def _cause(exception: str, frames: Sequence[traceback.FrameSummary], source: str, last_line: str) -> ErrorCause:
    if not frames:
        return ErrorCause(exception=exception, source=source)
    own = [frame for frame in frames if not is_library(frame.filename)] or frames
    text = "".join(traceback.format_list(list(frames)))[-MAX_TRACEBACK:]
    return ErrorCause(
        exception=exception,
        source=source,
        file=own[-1].filename,
        line=own[-1].lineno or 0,
        traceback=f"Traceback (most recent call last):\n{text}{last_line}".rstrip(),
    )


def _exception_line(error: BaseException) -> str:
    """Return type and message of an exception as the end of a traceback has them."""
    try:
        return replace_surrogates("".join(traceback.format_exception_only(error)))
    except BaseException:  # noqa: BLE001  (__str__ is user code too, and may even exit)
        return describe_error(error)


def _is_ours(file: str) -> bool:
    return file.startswith(_OURS) and not file.startswith(_USER_LIKE)


def _is_plumbing(file: str) -> bool:
    return _is_ours(file) or any(part in file for part in _PLUMBING)
