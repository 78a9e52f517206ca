"""Logging: readable events on a terminal, JSON lines everywhere else; on stderr unless a file is given."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import structlog


def configure_logging(role: str, *, file: TextIO | None = None, level: str = "debug") -> None:
    """Set up structlog for this process.

    Args:
        role: added to every event.
        file: where to write if the terminal is used for something else, such as a progress display; None: stderr.
        level: events below it are not logged.
    """
    people = file is None and sys.stderr.isatty()
    renderer = structlog.dev.ConsoleRenderer() if people else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([] if people else [structlog.processors.format_exc_info]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file or sys.stderr),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(role=role)


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
