"""Calls in threads, and the threads that outlive their call's deadline."""

import time
from collections.abc import Callable, Mapping, Sequence
from threading import Lock, get_ident
from typing import Any

import anyio

from envs.call.call_memory import call_text, current_slot
from envs.call.causes import stack_of_thread
from envs.call.outcomes import Ok, Outcome, TimedOut, call_inline
from envs.call.signatures import is_awaitable

Call = tuple[Callable[..., Any], Mapping[str, Any]]
"""A function with its keyword arguments."""
TimedOutcome = tuple[Outcome, float]
"""How a call ended, and its wall time in seconds."""


class AbandonedThreads:
    """Counts threads that still run user code past their deadline.

    Each is replaced, so no call waits behind it, but it holds memory and keeps the process from exiting. A thread whose
    function returns late is no longer counted.
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


class ThreadCalls:
    """Functions that one thread calls one after the other, and that may be abandoned meanwhile.

    Args:
        calls: each function with its keyword arguments. Those after one that returns an awaitable are not called: its
            value is not known yet.
    """

    __slots__ = ("_abandoned", "_has_ended", "_lock", "calls", "outcomes", "started_at", "thread_id")

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls
        self._lock = Lock()
        self._has_ended = False
        self._abandoned: AbandonedThreads | bool = False
        """The counter that counts the thread; True if no function was running."""
        self.outcomes: list[TimedOutcome] = []
        """Of the calls that have ended."""
        self.started_at = 0.0
        """When the present call started, by the monotonic clock; of the first one: when it was handed over."""
        self.thread_id: int | None = None
        """Thread that runs the present function; None if none is running."""

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
