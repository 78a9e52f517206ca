"""Logging: events for people on a terminal, JSON lines everywhere else; on stderr unless a file is given."""

import sys
from typing import TextIO

import structlog


def configure(role: str, file: TextIO | None = None) -> None:
    """Set up structlog for this process.

    Args:
        role: named in every event.
        file: where the terminal is for something else, a progress display for one.
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
        logger_factory=structlog.WriteLoggerFactory(file or sys.stderr),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(role=role)
