"""Calls in threads, and the threads that outlive their call's deadline."""

from collections.abc import Callable, Mapping
from threading import Lock, get_ident
from typing import Any, Literal

import anyio

from envs.call.outcomes import Outcome, TimedOut, call_inline


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


class ThreadCall:
    """One call in a thread, which may be abandoned while it runs."""

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        self._function = function
        self._arguments = arguments
        self._lock = Lock()
        self._state: Literal["queued", "running", "finished", "cancelled"] = "queued"
        self._abandoned_in: AbandonedThreads | None = None
        self.thread_id: int | None = None
        """Thread that runs the function; None before it starts and after it has returned."""

    def run(self) -> Outcome:
        """Call the function, unless it was abandoned before it started. Runs in the thread."""
        with self._lock:
            if self._state == "cancelled":
                return TimedOut(0.0)
            self._state = "running"
            self.thread_id = get_ident()
        try:
            return call_inline(self._function, self._arguments)
        finally:
            with self._lock:
                self._state = "finished"
                self.thread_id = None
                if self._abandoned_in is not None:
                    self._abandoned_in.remove()

    def abandon(self) -> None:
        """Count this thread as abandoned until the function returns. Runs on the event loop.

        A function that has not started yet is not counted, and never called.
        """
        with self._lock:
            if self._state == "queued":
                self._state = "cancelled"
            elif self._state == "running":
                self._abandoned_in = abandoned_threads
                self._abandoned_in.add()
