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
"""Seconds between a failure and the exit of the server, in which waiting requests get their errors."""


class ThreadMessage(Protocol):
    """A piece of work for the thread, with its result. The thread owns it until `wake` is called."""

    error: EngineError | None
    """Why the message has no result; None: it has one, or is not finished."""

    @property
    def wake(self) -> Callable[[], None]:
        """Function that wakes the waiting request; called on the event loop."""


Message = TypeVar("Message", bound=ThreadMessage)


class ModelThread(ABC, Generic[Message]):
    """Processes the messages in its mailbox until it is stopped or fails.

    Subclasses implement one step of the work. Other threads may use only `submit`, `stop` and the counters.

    Args:
        deliver: passes a batch of finished messages to the event loop, which calls `wake` on each.
        on_failure: called once, when the work has failed permanently.
    """

    activity: ClassVar[str]
    """Name of the thread's work in error messages, for example `generation`."""

    def __init__(self, deliver: Callable[[list[Message]], object], on_failure: Callable[[], object]) -> None:
        self.failure: Exception | None = None
        """The error that ended the work; None: it has not failed."""
        self._deliver = deliver
        self._on_failure = on_failure
        self._mailbox: SimpleQueue[Message | None] = SimpleQueue()
        """Incoming messages; None wakes the thread so that it notices `stop`."""
        self._stopping = False

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Number of requests that have not been started."""

    def submit(self, message: Message) -> None:
        """Put a message into the mailbox. Thread-safe."""
        self._mailbox.put(message)

    def stop(self) -> None:
        """Make `run` return after its current step; unfinished messages get an error. Thread-safe."""
        self._stopping = True
        self._mailbox.put(None)

    def run(self, threads: int) -> None:
        """Process messages until `stop`; the body of the thread.

        Args:
            threads: number of torch threads.
        """
        torch.set_num_threads(threads)
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self.step()
        except Exception as error:  # any error: /health must report it, and no request may wait forever
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
        """Do the next piece of work; block until a message arrives if there is none."""

    @abstractmethod
    def _take_unfinished(self) -> list[Message]:
        """Remove and return all unfinished messages; messages in the mailbox may stay there."""

    def _reject(self, messages: Sequence[Message | None], error: EngineError) -> None:
        """Finish these messages, and all in the mailbox, with an error."""
        rejected = [message for message in messages if message is not None]
        while not self._mailbox.empty():
            if (message := self._mailbox.get()) is not None:
                rejected.append(message)
        for message in rejected:
            message.error = message.error or error
        if rejected:
            self._deliver(rejected)


class LoopBridge:
    """Connects a `ModelThread` to the event loop. Create it on the loop; the thread calls `deliver` and `fail`."""

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
        """Wait until the thread has failed, and give its requests time to be answered.

        Raises:
            EngineError: the thread has failed.
        """
        await self._failed.wait()
        await anyio.sleep(_FAILURE_REPLY_S)
        raise EngineError(f"{thread.activity} has failed: {thread.failure!r}; {_remedy(thread.failure)}")


@asynccontextmanager
async def run_model_thread(thread: ModelThread[Any], threads: int) -> AsyncIterator[None]:
    """Run the thread while the context is open.

    Args:
        thread: the thread to run.
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


def _remedy(failure: Exception | None) -> str:
    if isinstance(failure, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(failure):
        return "lower engine.max_batch_size or engine.max_model_len, which decide the size of the cache"
    return "a restart of the server may help"
