"""How a call of user code ended, and what to say about it."""

from collections.abc import Callable, Mapping
from traceback import FrameSummary
from typing import Any

from msgspec import Struct

_MAX_TEXT = 2000


class Ok(Struct, frozen=True):
    """The call returned."""

    value: Any


class Failed(Struct, frozen=True):
    """The call raised."""

    error: BaseException
    interim: bytes | None = None
    """The interim result of a job whose process ended (`envs.processes.child_main.report_interim`)."""


class TimedOut(Struct, frozen=True):
    """The call passed its deadline. A thread cannot be stopped, so the function may still be running."""

    timeout_s: float
    interim: bytes | None = None
    """The interim result of a job whose process was killed."""
    stack: tuple[FrameSummary, ...] = ()
    """Where the function was when the deadline passed; empty if that is unknown."""


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
