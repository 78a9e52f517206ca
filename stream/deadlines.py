"""Deadlines of thousands of short waits per second, nearly all of which end in time."""

import asyncio  # noqa: TID251  (anyio has no timers)
from collections.abc import Callable
from typing import Final

_FOREVER_S: Final = 1e8
"""The longest timer."""
_TICK_S: Final = 0.001
"""Loops count in milliseconds; a shorter timer may end at once."""
_MAX_LENGTHS: Final = 64
"""Lengths of which no deadline is pending are forgotten beyond this number."""


class Deadline:
    """One pending deadline; `cancel` it when the wait is over."""

    __slots__ = ("_pending", "at", "on_passed")

    def __init__(self, pending: "dict[Deadline, None]", at: float, on_passed: Callable[[], None]) -> None:
        self._pending, self.at, self.on_passed = pending, at, on_passed
        pending[self] = None

    def cancel(self) -> None:
        """Forget the deadline, and what was to be called: that mostly refers back to the deadline."""
        self._pending.pop(self, None)
        self.on_passed = _nothing


class _Length:
    """The pending deadlines of one length, which pass in the order in which they were added, and their timer."""

    __slots__ = ("pending", "timer")

    def __init__(self) -> None:
        self.pending: dict[Deadline, None] = {}
        self.timer: asyncio.TimerHandle | None = None


class Deadlines:
    """The deadlines of one event loop, with one timer for all of the same length.

    A timer of the loop for each of them, as `loop.call_later` makes it, costs several times as much.

    Args:
        loop: calls what is to be called.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lengths: dict[float, _Length] = {}

    def add(self, timeout_s: float, on_passed: Callable[[], None]) -> Deadline:
        """Call a function after that time, unless the deadline is cancelled."""
        length = self._lengths.get(timeout_s)
        if length is None:
            length = self._add_length(timeout_s)
        deadline = Deadline(length.pending, self._loop.time() + timeout_s, on_passed)
        if length.timer is None:
            self._start_timer(length, timeout_s)
        return deadline

    def _add_length(self, timeout_s: float) -> _Length:
        if len(self._lengths) >= _MAX_LENGTHS:
            for unused in [length_s for length_s, length in self._lengths.items() if not length.pending]:
                length = self._lengths.pop(unused)
                if length.timer is not None:
                    length.timer.cancel()
        self._lengths[timeout_s] = length = _Length()
        return length

    def _start_timer(self, length: _Length, delay_s: float) -> None:
        length.timer = self._loop.call_later(min(max(delay_s, _TICK_S), _FOREVER_S), self._check, length)

    def _check(self, length: _Length) -> None:
        """Call what has passed, after a timer for the next one is started."""
        length.timer = None
        passed: list[Deadline] = []
        now = self._loop.time()
        for deadline in length.pending:
            if deadline.at > now:
                self._start_timer(length, deadline.at - now)
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
