"""Whether a process is alive and whether it can do its work, as `/health` and `/ready` answer."""

import time
from collections.abc import Callable

import anyio

_BEAT_S = 1.0
_STARTING = "the role is starting"


class RoleHealth:
    """Health of one process. Its event loop updates it; any thread may read it.

    Args:
        max_pause_s: longest time without a turn of the event loop in a process that is alive.
    """

    def __init__(self, max_pause_s: float = 15.0) -> None:
        self._max_pause_s = max_pause_s
        self._last_turn = time.monotonic()
        self._find_problem: Callable[[], str] = lambda: _STARTING

    def ready_when(self, find_problem: Callable[[], str]) -> None:
        """Set how readiness is decided.

        Args:
            find_problem: returns why the process cannot work now, empty if it can. It is called from another thread, so
                it must only read, and must not wait.
        """
        self._find_problem = find_problem

    def mark_ready(self) -> None:
        """Note that the process has opened all that it needs."""
        self.ready_when(lambda: "")

    async def watch(self) -> None:
        """Note that the event loop turns, once a second, until cancelled."""
        while True:
            self._last_turn = time.monotonic()
            await anyio.sleep(_BEAT_S)

    @property
    def paused_s(self) -> float:
        """Seconds since the event loop last turned, less the second between two notes."""
        return max(0.0, time.monotonic() - self._last_turn - _BEAT_S)

    def liveness_problem(self) -> str:
        """Return why the process is not alive; empty if it is."""
        paused_s = self.paused_s
        if paused_s <= self._max_pause_s:
            return ""
        return f"the event loop has not turned for {paused_s:.0f} s; event_loop.blocked in the log names the code"

    def readiness_problem(self) -> str:
        """Return why the process cannot do its work now; empty if it can."""
        return self.liveness_problem() or self._find_problem()
