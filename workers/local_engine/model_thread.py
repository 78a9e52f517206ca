"""The thread that owns a model, seen from the event loop in front of it: it works, hands over, and may fail."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NoReturn, Protocol

import anyio
import anyio.lowlevel
import anyio.to_thread

from stream.errors import EngineError

_FAILURE_REPLY_S = 1.0
"""After its work has failed: time to tell those that wait."""


class ModelThread(Protocol):
    """What the thread does."""

    failure: Exception | None
    """What ended its work for good."""

    @property
    def waiting(self) -> int:
        """Requests that are not being worked on yet."""

    def run(self, threads: int) -> None:
        """Work until `stop`, with so many torch threads; the body of the thread."""

    def stop(self) -> None:
        """Let `run` return soon; what is unfinished is answered with an error."""


class ThreadMessage(Protocol):
    """What is handed over."""

    def wake(self) -> None:
        """Wake whoever waits for it; on the loop."""


class LoopBridge:
    """Where the thread leaves what is for the event loop. Made on the loop; `deliver` and `fail` are the thread's."""

    def __init__(self) -> None:
        self._loop: Any = anyio.lowlevel.current_token().native_token  # from_thread.run would block until it ran
        self._failed = anyio.Event()

    def deliver(self, messages: Iterable[ThreadMessage]) -> None:
        """Hand over what is done."""
        self._loop.call_soon_threadsafe(_wake_all, messages)

    def fail(self) -> None:
        """The work has failed for good."""
        self._loop.call_soon_threadsafe(self._failed.set)

    async def wait_failed(self, model_thread: ModelThread, activity: str) -> NoReturn:
        """Wait until the work has failed, and those that waited for it were told.

        Args:
            model_thread: does it.
            activity: what it is, in a word.

        Raises:
            EngineError: it has.
        """
        await self._failed.wait()
        await anyio.sleep(_FAILURE_REPLY_S)
        raise EngineError(
            f"{activity} has failed: {model_thread.failure!r}; a server that is started again may do better"
        )


@asynccontextmanager
async def run_model_thread(model_thread: ModelThread, threads: int) -> AsyncIterator[None]:
    """The thread works while the context is open."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(anyio.to_thread.run_sync, model_thread.run, threads, limiter=anyio.CapacityLimiter(1)))
        try:
            yield
        finally:
            model_thread.stop()


def _wake_all(messages: Iterable[ThreadMessage]) -> None:
    for one in messages:
        one.wake()
