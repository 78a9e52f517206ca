"""A thread that owns a model, and its bridge to the event loop that serves requests.

::

    event loop ── submit(message) ──► mailbox ──► ModelThread: works in steps, one at a time
        ▲                                              │
        └── LoopBridge ── message.wake() ◄── deliver ──┘
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, ClassVar, Generic, NoReturn, Protocol, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import structlog
import torch

from stream.errors import EngineError

log = structlog.get_logger()

_FAILURE_REPLY_S = 1.0
"""For waiting requests to be answered after a failure, before the server ends."""


class ThreadMessage(Protocol):
    """Work for the thread, with its result. The thread owns it until `wake` is called."""

    error: EngineError | None
    """Why there is no result."""

    @property
    def wake(self) -> Callable[[], None]:
        """Wakes the request that waits for it; called on the event loop."""


Message = TypeVar("Message", bound=ThreadMessage)


class ModelThread(ABC, Generic[Message]):
    """Works on the messages in its mailbox until it is stopped or fails.

    Subclasses implement one step of the work. Only `submit`, `stop` and the counters are for other threads.

    Args:
        deliver: hands finished messages to the event loop, which calls `wake` on each; one call for many.
        on_failure: called once, when the work has failed and will not go on.
    """

    activity: ClassVar[str]
    """What the thread does, in error messages: `generation`."""

    def __init__(self, deliver: Callable[[list[Message]], object], on_failure: Callable[[], object]) -> None:
        self.failure: Exception | None = None
        """What ended the work."""
        self._deliver = deliver
        self._on_failure = on_failure
        self._mailbox: SimpleQueue[Message | None] = SimpleQueue()
        """None wakes the thread up to see that it is to stop."""
        self._stopping = False

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Requests that have not been started."""

    def submit(self, message: Message) -> None:
        """Put a message into the mailbox."""
        self._mailbox.put(message)

    def stop(self) -> None:
        """Make `run` return soon; unfinished messages get an error."""
        self._stopping = True
        self._mailbox.put(None)

    def run(self, threads: int) -> None:
        """Work until `stop`; the body of the thread.

        Args:
            threads: number of torch threads.
        """
        torch.set_num_threads(threads)
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self.step()
        except Exception as error:  # of any kind: /health reports it, and no request may wait forever
            log.exception("engine.failed")
            self.failure = error
            self._on_failure()
            failed = EngineError(f"{self.activity} has failed: {error!r}; restart the server")
            self._reject(self._take_unfinished(), failed)
            while not self._stopping:
                self._reject([self._mailbox.get()], failed)
        self._reject(self._take_unfinished(), EngineError("the server is shutting down"))

    @abstractmethod
    def step(self) -> None:
        """Do the next piece of work; wait for a message if there is none."""

    @abstractmethod
    def _take_unfinished(self) -> list[Message]:
        """Give up all messages that are not finished; those in the mailbox may be left there."""

    def _reject(self, messages: Sequence[Message | None], error: EngineError) -> None:
        """Answer these messages, and all in the mailbox, with an error."""
        rejected = [message for message in messages if message is not None]
        while not self._mailbox.empty():
            if (message := self._mailbox.get()) is not None:
                rejected.append(message)
        for message in rejected:
            message.error = message.error or error
        if rejected:
            self._deliver(rejected)


class LoopBridge:
    """The event loop's end of a `ModelThread`; made on the loop, `deliver` and `fail` are called by the thread."""

    def __init__(self) -> None:
        self._loop: Any = anyio.lowlevel.current_token().native_token  # from_thread.run would block until it ran
        self._failed = anyio.Event()

    def deliver(self, messages: Iterable[ThreadMessage]) -> None:
        """Wake the requests that wait for these messages."""
        self._loop.call_soon_threadsafe(_wake_all, messages)

    def fail(self) -> None:
        """Make `wait_failed` return."""
        self._loop.call_soon_threadsafe(self._failed.set)

    async def wait_failed(self, thread: ModelThread[Any]) -> NoReturn:
        """Wait until the thread has failed and its requests have been answered.

        Raises:
            EngineError: it has failed.
        """
        await self._failed.wait()
        await anyio.sleep(_FAILURE_REPLY_S)
        raise EngineError(f"{thread.activity} has failed: {thread.failure!r}; a restart of the server may help")


@asynccontextmanager
async def run_model_thread(thread: ModelThread[Any], threads: int) -> AsyncIterator[None]:
    """Run the thread as long as the context is open.

    Args:
        thread: what to run.
        threads: number of torch threads.
    """
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(anyio.to_thread.run_sync, thread.run, threads, limiter=anyio.CapacityLimiter(1)))
        try:
            yield
        finally:
            thread.stop()


def _wake_all(messages: Iterable[ThreadMessage]) -> None:
    for message in messages:
        message.wake()
