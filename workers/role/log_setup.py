"""Logging: readable events on a terminal, JSON lines everywhere else; on stderr unless a file is given."""

import io
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import structlog

from stream.disk_space import no_room
from stream.wording import escape_controls

log = structlog.get_logger()


def configure_logging(role: str, *, file: TextIO | None = None, level: str = "debug") -> None:
    """Set up structlog for this process.

    Args:
        role: added to every event.
        file: where to write if the terminal is used for something else, such as a progress display; None: stderr.
        level: events below it are not logged.
    """
    people = file is None and sys.stderr.isatty()
    plain = structlog.dev.plain_traceback  # a rich one shows local variables, in which passwords are
    people_renderer = structlog.dev.ConsoleRenderer(exception_formatter=plain)
    renderer = people_renderer if people else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([_escape_values] if people else [structlog.processors.format_exc_info]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(_LossyFile(file or sys.stderr)),  # type: ignore[arg-type]
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(role=role)
    _log_warnings()


def _log_warnings() -> None:
    """Log what Python and libraries warn of, once for each place; also what is deprecated in calls by our own code.

    A deprecation fails tests, whose filter makes errors of warnings. In a run it must not fail a request.
    """
    if not sys.warnoptions:
        warnings.filterwarnings("default", category=DeprecationWarning, module=r"(stream|envs|workers)\.")

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object, **__: object
    ) -> None:
        log.warning("python.warned", category=category.__name__, text=str(message), place=f"{filename}:{lineno}")

    warnings.showwarning = show


def _escape_values(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Make control characters visible: what servers and models wrote must not change the terminal's state."""
    return {key: escape_controls(value) if isinstance(value, str) else value for key, value in event.items()}


class _LossyFile:
    """A log file that drops lines instead of raising when its disk is full: an event must not end a process.

    Lines are written to the descriptor, because a text file would keep what it could not write and raise again later.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        try:
            self._descriptor: int | None = None if file.isatty() else file.fileno()
        except (OSError, ValueError):  # an object without a descriptor, such as a test's
            self._descriptor = None

    def write(self, text: str) -> None:
        """Write a line, if the disk has room."""
        if self._descriptor is None:
            self._file.write(text)
            return
        data = memoryview(text.encode(errors="backslashreplace"))
        with suppress(OSError):
            while data:
                data = data[os.write(self._descriptor, data) :]

    def flush(self) -> None:
        """Flush; lines in a file are not buffered."""
        if self._descriptor is None:
            self._file.flush()


class _LossyDescriptor(io.FileIO):
    """A descriptor that takes what it cannot write because its disk is full."""

    def write(self, data: Any) -> int:
        """Write, if the disk has room."""
        try:
            return super().write(data)
        except OSError as error:
            if not no_room(error):
                raise
            return len(memoryview(data).cast("B"))


def drop_output_when_full() -> None:
    """Drop what is printed while the disk of the log is full: a `print` in user code must not fail for that."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is getattr(sys, f"__{name}__") and not os.isatty(descriptor):
            raw = io.BufferedWriter(_LossyDescriptor(descriptor, "wb", closefd=False))
            text = io.TextIOWrapper(raw, "utf-8", "backslashreplace", line_buffering=True)
            setattr(sys, name, text)


@contextmanager
def log_nothing() -> Iterator[None]:
    """Log nothing inside the context, unless this process has set up logging: a Python caller gets a value instead."""
    if structlog.is_configured():
        yield
        return
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    try:
        yield
    finally:
        structlog.reset_defaults()


@contextmanager
def log_to_file(role: str, path: Path) -> Iterator[None]:
    """Write this process's events to a file inside the context; the terminal shows progress, stdout the result."""
    before, bound = structlog.get_config(), structlog.contextvars.get_contextvars()
    with path.open("a", buffering=1) as file:
        configure_logging(role, file=file)
        try:
            yield
        finally:
            structlog.configure(**before)
            structlog.contextvars.clear_contextvars()
            structlog.contextvars.bind_contextvars(**bound)
