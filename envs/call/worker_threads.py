"""Threads for synchronous user code that are woken once for many calls.

Waking a thread costs more than most tools and resets do. Calls that are handed over at about the same time are
therefore run by one thread, one after the other. A thread that is in one call for longer than `_PATIENCE_S` gets no
further calls: the waiting ones go to other threads, each to its own. So a call that blocks delays others by
milliseconds, and any number of calls may block at the same time.
"""

import asyncio  # noqa: TID251  (a future and a timer of the loop take a tenth of anyio's event and cancel scope)
import math
import threading
import time
from collections import deque
from contextvars import Context, ContextVar, copy_context
from typing import Final

from anyio.lowlevel import RunVar

from envs.call.threads import ThreadCalls, TimedOutcome

try:
    from sniffio import current_async_library_cvar as _async_library
except ImportError:  # then anyio does not look at it either
    _async_library = ContextVar("unused", default=None)

_PATIENCE_S: Final = 0.002
"""How long calls wait behind the one that a thread is in."""
_TIMER_ERROR_S: Final = 0.002
"""How much too early a timer may be."""
_IDLE_S: Final = 10.0
"""After this time without a call a thread ends."""


class _Job:
    """Calls that were handed over, and what the caller waits for."""

    __slots__ = ("_loop", "calls", "context", "deadline", "finished", "timeout_s")

    def __init__(self, calls: ThreadCalls, timeout_s: float, loop: asyncio.AbstractEventLoop) -> None:
        self.calls = calls
        self.context: Context = copy_context()
        self.context.run(_async_library.set, None)  # user code may run an event loop of its own
        self.finished: asyncio.Future[None] = loop.create_future()
        self.timeout_s = timeout_s
        calls.started_at = time.monotonic()
        self._loop = loop
        self.deadline = loop.call_later(timeout_s, self._check_deadline)

    def _check_deadline(self) -> None:
        """End the wait, unless another call is running now than the one that the deadline was for."""
        left_s = self.calls.started_at + self.timeout_s - time.monotonic()
        if left_s > _TIMER_ERROR_S:
            self.deadline = self._loop.call_later(left_s, self._check_deadline)
        elif self.calls.time_out(self.timeout_s):
            self.finish()

    def finish(self) -> None:
        """Wake the caller."""
        if not self.finished.done():
            self.finished.set_result(None)


class _Worker(threading.Thread):
    """One thread. It never keeps the process from exiting."""

    def __init__(self, threads: "WorkerThreads") -> None:
        super().__init__(name="user code", daemon=True)
        self._threads = threads
        self.wake_up = threading.Lock()
        """Locked while the thread is to sleep."""
        self.wake_up.acquire()
        self.busy_since = math.inf
        """When its present call started; infinity between two calls, and while it wakes up."""
        self.is_slow = False
        """It was in one call for too long, and is not counted as available until it returns."""

    def run(self) -> None:
        """Run calls until there has been none for a while."""
        while True:
            job = self._threads.next_job(self)
            if job is not None:
                self.busy_since = time.monotonic()
                job.context.run(job.calls.run)
                self.busy_since = math.inf
                self._threads.finish(job)
                del job  # an idle thread keeps nothing alive
            elif not self.wake_up.acquire(timeout=_IDLE_S) and self._threads.retire(self):
                return


class WorkerThreads:
    """The threads of one event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._jobs: deque[_Job] = deque()
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._available = 0
        """Busy threads that are not slow: one of them takes the next job soon."""
        self._wake_scheduled = False
        self._relief: asyncio.TimerHandle | None = None
        """Timer of `_relieve`, while calls wait for a busy thread."""
        self._finished: deque[_Job] = deque()
        self._delivery_scheduled = False

    async def run(self, calls: ThreadCalls, timeout_s: float) -> list[TimedOutcome]:
        """Run calls in a thread; each has this deadline. If one misses it, or this is cancelled, they are abandoned.

        The deadline is a timer, not a cancel scope, which would cost more than a quick call.

        Returns:
            The outcomes of the first calls, of at least one. The last one may be `TimedOut`, or an awaitable.
        """
        job = _Job(calls, timeout_s, self.loop)
        with self._lock:
            self._jobs.append(job)
            if self._available:
                self._schedule_relief()
            elif not self._wake_scheduled:  # when the loop has nothing else to do: it holds the interpreter until then
                self._wake_scheduled = True
                self.loop.call_soon(self._wake)
        try:
            await job.finished
        except BaseException:
            calls.abandon()
            raise
        finally:
            job.deadline.cancel()
        return calls.outcomes

    # In the threads

    def next_job(self, worker: _Worker) -> _Job | None:
        """Return the next call for a thread; None if it is to sleep until it is woken."""
        with self._lock:
            if worker.is_slow:
                worker.is_slow = False
                self._available += 1
            if self._jobs:
                return self._jobs.popleft()
            self._busy.discard(worker)
            self._available -= 1
            self._idle.append(worker)
            return None

    def finish(self, job: _Job) -> None:
        """Hand a finished call to the event loop, which is woken once for all that are finished by then."""
        with self._lock:
            self._finished.append(job)
            if self._delivery_scheduled:
                return
            self._delivery_scheduled = True
        try:
            self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the event loop is closed: nobody waits
            return

    def retire(self, worker: _Worker) -> bool:
        """Whether a thread that has slept for long may end; false if it is being woken."""
        with self._lock:
            if worker in self._idle:
                self._idle.remove(worker)
                return True
        worker.wake_up.acquire()
        return False

    # On the event loop

    def _deliver(self) -> None:
        with self._lock:
            self._delivery_scheduled = False
            finished, self._finished = self._finished, deque()
            if self._relief is not None and not self._jobs:  # it would wake the loop for nothing
                self._relief.cancel()
                self._relief = None
        for job in finished:
            job.finish()

    def _wake(self) -> None:
        """Wake a thread for the calls that have been handed over, unless one has taken them."""
        with self._lock:
            self._wake_scheduled = False
            wakes_one = bool(self._jobs) and not self._available
            if wakes_one:
                self._wake_one()
            if len(self._jobs) > wakes_one:  # the thread that wakes up takes one of them
                self._schedule_relief()

    def _schedule_relief(self) -> None:
        if self._relief is None:
            self._relief = self.loop.call_later(_PATIENCE_S, self._relieve)

    def _relieve(self) -> None:
        """Have every waiting call run by a thread of its own if the available threads are slow."""
        with self._lock:
            self._relief = None
            if not self._jobs or self._wake_scheduled:  # one thread is about to be woken for all of them
                return
            limit = time.monotonic() - _PATIENCE_S
            for worker in self._busy:
                if not worker.is_slow and worker.busy_since < limit:
                    worker.is_slow = True
                    self._available -= 1
            if not self._available:
                for _ in range(len(self._jobs)):
                    self._wake_one()
            self._schedule_relief()

    def _wake_one(self) -> None:
        self._available += 1
        if self._idle:
            worker = self._idle.pop()
            self._busy.add(worker)
            worker.wake_up.release()
        else:
            worker = _Worker(self)
            self._busy.add(worker)
            worker.start()


_threads: RunVar[WorkerThreads] = RunVar("user_code_threads")


def worker_threads() -> WorkerThreads:
    """Return the threads of the running event loop."""
    try:
        return _threads.get()
    except LookupError:
        _threads.set(threads := WorkerThreads())
        return threads
