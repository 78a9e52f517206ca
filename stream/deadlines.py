"""Deadlines of thousands of short waits per second, nearly all of which end in time."""

import asyncio  # noqa: TID251  (anyio has no timers)
from collections.abc import Callable
from typing import Final

_FOREVER_S: Final = 1e8
"""The longest timer."""
_TICK_S: Final = 0.001
"""Loops count in milliseconds; a shorter timer may end at once."""
_MAX_QUEUES: Final = 64
"""Beyond this number, queues without a pending deadline are removed."""


class Deadline:
    """One pending deadline; `cancel` it when the wait is over.

    Attributes:
        at: when it passes, by the loop's clock.
        on_passed: what is called then.
    """

    __slots__ = ("_pending", "at", "on_passed")

    def __init__(self, pending: "dict[Deadline, None]", at: float, on_passed: Callable[[], None]) -> None:
        self._pending, self.at, self.on_passed = pending, at, on_passed
        pending[self] = None

    def cancel(self) -> None:
        """Forget the deadline, and what was to be called: that mostly refers back to the deadline."""
        self._pending.pop(self, None)
        self.on_passed = _nothing


class _Queue:
    """The pending deadlines with the same timeout, in the order in which they pass, and their timer."""

    __slots__ = ("pending", "timer")

    def __init__(self) -> None:
        self.pending: dict[Deadline, None] = {}
        self.timer: asyncio.TimerHandle | None = None


class Deadlines:
    """The deadlines of one event loop, with one timer for all that have the same timeout.

    A timer of the loop for each of them, as `loop.call_later` makes it, costs several times as much.

    Args:
        loop: calls what is to be called.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queues: dict[float, _Queue] = {}
        """By timeout."""

    def add(self, timeout_s: float, on_passed: Callable[[], None]) -> Deadline:
        """Call a function after that time, unless the deadline is cancelled."""
        queue = self._queues.get(timeout_s)
        if queue is None:
            queue = self._add_queue(timeout_s)
        deadline = Deadline(queue.pending, self._loop.time() + timeout_s, on_passed)
        if queue.timer is None:
            self._start_timer(queue, timeout_s)
        return deadline

    def _add_queue(self, timeout_s: float) -> _Queue:
        if len(self._queues) >= _MAX_QUEUES:
            for unused in [key for key, queue in self._queues.items() if not queue.pending]:
                queue = self._queues.pop(unused)
                if queue.timer is not None:
                    queue.timer.cancel()
        self._queues[timeout_s] = queue = _Queue()
        return queue

    def _start_timer(self, queue: _Queue, delay_s: float) -> None:
        queue.timer = self._loop.call_later(min(max(delay_s, _TICK_S), _FOREVER_S), self._check, queue)

    def _check(self, queue: _Queue) -> None:
        """Call what has passed, after a timer for the next one is started."""
        queue.timer = None
        passed: list[Deadline] = []
        now = self._loop.time()
        for deadline in queue.pending:
            if deadline.at > now:
                self._start_timer(queue, deadline.at - now)
                break
            passed.append(deadline)
        for deadline in passed:
            on_passed = deadline.on_passed  # nothing, if one of the others cancelled it
            deadline.cancel()
            try:
                on_passed()
            except Exception as error:  # noqa: BLE001  (as the loop does with each of its timers)
                self._loop.call_exception_handler({"message": f"a deadline's {on_passed!r} failed", "exception": error})


def _nothing() -> None:
    """Do nothing."""
