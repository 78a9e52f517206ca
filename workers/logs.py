"""Logging: events for people on a terminal, JSON lines everywhere else, always on stderr."""

import sys

import structlog


def configure(role: str) -> None:
    """Set up structlog for this process."""
    people = sys.stderr.isatty()
    renderer = structlog.dev.ConsoleRenderer() if people else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([] if people else [structlog.processors.format_exc_info]),
            renderer,
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(role=role)
