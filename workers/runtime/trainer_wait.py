"""Waiting for what the trainer writes to the server when it starts."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
import structlog

from stream.connection.run_connection import MAX_BLOCK_S
from stream.errors import RunFailedError
from workers.runtime.context import WorkerContext

log = structlog.get_logger()
T = TypeVar("T")


async def wait_for_trainer(context: WorkerContext, read: Callable[[], Awaitable[T | None]], why: str) -> T:
    """Return what `read` returns as soon as it is not None; tries again after every change of the run.

    Args:
        context: of this worker.
        read: reads from the server; None: the trainer has not written it yet.
        why: what this worker lacks, for the log and the error.

    Raises:
        RunFailedError: no trainer has written it within `abort.stall_timeout_s`.
    """
    timeout_s = context.settings.abort.stall_timeout_s
    deadline, logged = anyio.current_time() + timeout_s, False
    while (found := await read()) is None:
        if anyio.current_time() > deadline:
            raise RunFailedError(
                f"{why}, and no trainer has written it to the server within abort.stall_timeout_s = {timeout_s:g} s; "
                "start a trainer"
            )
        if not logged:
            log.info("trainer.waiting", why=why)
            logged = True
        await context.connection.wait_for_change("$", MAX_BLOCK_S)
        await context.connection.poll_stop()
    return found
