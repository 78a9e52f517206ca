"""Unexpected exceptions of pages: a line for the viewer, and the traceback for the log."""

import anyio.to_thread
import structlog

log = structlog.get_logger()


def describe_exception(error: Exception) -> str:
    """Return an unexpected exception as text: its type, and its message if it has one."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


async def log_page_failure(error: Exception, path: str) -> None:
    """Log the traceback of a page, or of a part of one. A traceback reads source files, so it is made in a thread."""
    await anyio.to_thread.run_sync(_log, error, path)


def _log(error: Exception, path: str) -> None:
    log.error("page.failed", path=path, exc_info=error)
