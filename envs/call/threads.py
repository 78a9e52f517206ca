"""Synchronous user code in threads: calls with deadlines, and the threads that outlive them.

The threads are daemons. Those of `concurrent.futures` are joined when Python exits, so that one hanging call would keep
the process. `background_loop` is the event loop of what outlives the call that opened it: sessions and pools.
"""

import asyncio  # noqa: TID251  (a future and a timer of the loop take a tenth of anyio's event and cancel scope)
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar, copy_context
from functools import partial
from os import register_at_fork
from queue import Empty, SimpleQueue
from threading import Lock, Thread, get_ident
from typing import Any, ClassVar, Final

import anyio
from anyio.from_thread import BlockingPortal

from envs.call.call_memory import call_text, current_slot
from envs.call.outcomes import Ok, Outcome, TimedOut, call_inline, stack_of_thread
from envs.call.signatures import is_awaitable

try:
    from sniffio import current_async_library_cvar as _async_library
except ImportError:  # then anyio does not look at it either
    _async_library = ContextVar("unused", default=None)

Call = tuple[Callable[..., Any], Mapping[str, Any]]
"""A function with its keyword arguments."""
TimedOutcome = tuple[Outcome, float]
"""How a call ended, and its wall time in seconds."""
_TIMER_ERROR_S: Final = 0.002
"""How much too early a timer may be."""
_PATIENCE_S: Final = 0.002
"""How long calls wait behind the one that a thread is in."""
_IDLE_S: Final = 10.0
"""After this time without a call a thread ends."""


class AbandonedThreads:
    """Counts threads that still run user code past their deadline.

    Each is replaced, so no call waits behind it, but it holds memory. A thread whose function returns late is no longer
    counted.
    """

    def __init__(self) -> None:
        self.count = 0
        """Threads abandoned and still running."""
        self._lock = Lock()
        self._changed: anyio.Event | None = None

    async def wait_for_count(self, count: int) -> None:
        """Wait until at least `count` threads are abandoned."""
        while self.count < count:
            self._changed = anyio.Event()
            await self._changed.wait()

    def add(self) -> None:
        """Count one more thread. Call it on the event loop."""
        with self._lock:
            self.count += 1
        if self._changed is not None:
            self._changed.set()

    def remove(self) -> None:
        """Count one thread less. Safe to call in any thread."""
        with self._lock:
            self.count -= 1


abandoned_threads = AbandonedThreads()
"""The counter of this process."""


class _Worker(Thread):
    """A thread that makes calls, one after the other, until there has been none for a while.

    Waking a thread costs more than most calls do. So one thread gets all calls, and calls of one moment wake it once: a
    call then takes 40 µs of CPU, not 110 to 140 (64 in flight, two cores). While the thread is slow in one of them, the
    next calls go to another thread, and each call that waits behind the slow one gets a thread of its own.
    """

    current: ClassVar["_Worker | None"] = None
    """The one that gets the next calls, unless it is slow."""
    idle: ClassVar[set["_Worker"]] = set()
    """Those that wait for a call."""

    def __init__(self) -> None:
        super().__init__(name="user code", daemon=True)
        self.jobs: SimpleQueue[ThreadCalls] = SimpleQueue()
        self._busy_since = math.inf
        """When its present call started; infinity while there is none."""

    @classmethod
    def choose(cls) -> "_Worker":
        """Return the worker for the next call."""
        if cls.current is None or cls.current.is_slow():
            cls.current = cls.take()
        return cls.current

    @classmethod
    def take(cls) -> "_Worker":
        """Return a worker that waits, or a new one."""
        try:
            return cls.idle.pop()
        except KeyError:
            (worker := cls()).start()
            return worker

    def is_slow(self) -> bool:
        """Return whether a call that waits for this thread should go to another one."""
        return time.monotonic() - self._busy_since > _PATIENCE_S

    def run(self) -> None:
        """See `Thread`."""
        while True:
            self.idle.add(self)
            try:
                job = self.jobs.get(timeout=_IDLE_S)
            except Empty:
                self._busy_since = -math.inf  # a call that is on its way will find it slow
                return
            finally:
                self.idle.discard(self)
            if job.take():
                self._busy_since = time.monotonic()
                job.context.run(job.run)
                self._busy_since = math.inf
                job.report()
            del job  # an idle thread keeps nothing alive


def _forget_workers() -> None:
    """Forget the threads of the parent process, which a fork does not have."""
    _Worker.current = None
    _Worker.idle.clear()


register_at_fork(after_in_child=_forget_workers)


class ThreadCalls:
    """Functions that one thread calls one after the other, and that may be abandoned meanwhile.

    Args:
        calls: each function with its keyword arguments. Those after one that returns an awaitable are not called: its
            value is not known yet.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls
        self._lock = Lock()
        self._is_taken = self._has_ended = False
        self._abandoned: AbandonedThreads | bool = False
        """The counter that counts the thread; True if no function was running."""
        self.outcomes: list[TimedOutcome] = []
        """How the calls that have ended did so, and how long they took."""
        self.started_at = 0.0
        """When the present call started, by the monotonic clock; of the first one: when it was handed over."""
        self.thread_id: int | None = None
        """Thread that runs the present function; None if none is running."""

    async def run_in_thread(self, timeout_s: float) -> list[TimedOutcome]:
        """Run the calls; each has this deadline. If one misses it, or this is cancelled, they are abandoned.

        Returns:
            The outcomes of the first calls, of at least one. The last one may be `TimedOut`, or an awaitable.
        """
        self._loop = loop = asyncio.get_running_loop()
        self._finished = loop.create_future()
        self._timeout_s = timeout_s
        self.context = copy_context()
        self.context.run(_async_library.set, None)  # user code may run an event loop of its own
        self.started_at = time.monotonic()
        self._timer = loop.call_later(min(_PATIENCE_S, timeout_s), self._check)
        self._worker = _Worker.choose()
        loop.call_soon(self._worker.jobs.put, self)  # the loop holds the interpreter until it has nothing else to do
        try:
            await self._finished
        except BaseException:
            self.abandon()
            raise
        finally:
            self._timer.cancel()
        return self.outcomes

    def _check(self) -> None:
        """Go to another thread if this one is slow; end the wait after the deadline of the call that is running now."""
        left_s = self.started_at + self._timeout_s - time.monotonic()
        if left_s > _TIMER_ERROR_S:
            if not self._is_taken:
                left_s = min(left_s, _PATIENCE_S)
                if self._worker.is_slow():
                    self._worker = _Worker.take()
                    self._worker.jobs.put(self)
            self._timer = self._loop.call_later(left_s, self._check)
        elif self.time_out(self._timeout_s):
            self._finish()

    def _finish(self) -> None:
        if not self._finished.done():
            self._finished.set_result(None)

    def take(self) -> bool:
        """Return whether no other thread has taken the calls. Runs in the thread."""
        with self._lock:
            was_taken, self._is_taken = self._is_taken, True
        return not was_taken

    def report(self) -> None:
        """Wake the caller. Runs in the thread."""
        try:
            self._loop.call_soon_threadsafe(self._finish)
        except RuntimeError:  # the event loop is closed: nobody waits
            return

    def run(self) -> None:
        """Call the functions until they are abandoned. Runs in the thread."""
        slot = current_slot()
        for function, arguments in self.calls:
            with self._lock:
                if self._abandoned:
                    return
                self.thread_id = get_ident()
                if self.outcomes:
                    self.started_at = time.monotonic()
            if slot is not None:
                slot.begin(call_text(function, arguments))
            outcome = call_inline(function, arguments)
            if slot is not None:
                slot.end()
            with self._lock:
                self.thread_id = None
                if isinstance(self._abandoned, AbandonedThreads):
                    self._abandoned.remove()
                    return
                self.outcomes.append((outcome, time.monotonic() - self.started_at))
                is_last = len(self.outcomes) == len(self.calls)
                self._has_ended = is_last or (type(outcome) is Ok and is_awaitable(outcome.value))
            if self._has_ended:
                return

    def abandon(self) -> int | None:
        """Count this thread as abandoned until its present function returns. Runs on the event loop.

        Functions that have not started yet are never called, and further outcomes are discarded.

        Returns:
            The thread that is running a function; None if none is.
        """
        with self._lock:
            if self.thread_id is None:
                self._abandoned = True
            elif not self._abandoned:
                self._abandoned = abandoned_threads
                self._abandoned.add()
            return self.thread_id

    def time_out(self, timeout_s: float) -> bool:
        """Abandon the calls, and add the outcome of the present one; False if they have ended in time."""
        if self._has_ended:
            return False
        thread_id = self.abandon()
        if self._has_ended:  # just before it was abandoned
            return False
        stack = () if thread_id is None else stack_of_thread(thread_id)
        self.outcomes.append((TimedOut(timeout_s, stack=stack), time.monotonic() - self.started_at))
        return True


_START_S = 30.0
_lock = threading.Lock()
_portals: list[BlockingPortal] = []


def background_loop() -> BlockingPortal:
    """Return the way into an event loop in a daemon thread, which lives as long as this process.

    Environments are called in threads that come and go, and what they open has to stay open: so it belongs to a task of
    this loop.

    Raises:
        TimeoutError: the thread did not start.
    """

    async def serve(ready: threading.Event) -> None:
        async with BlockingPortal() as portal:
            _portals.append(portal)
            ready.set()
            await portal.sleep_until_stopped()

    with _lock:
        if not _portals:
            ready = threading.Event()
            threading.Thread(target=partial(anyio.run, serve, ready), name="background loop", daemon=True).start()
            if not ready.wait(_START_S):
                raise TimeoutError(f"the thread of the background loop did not start within {_START_S:g} s")
    return _portals[0]
