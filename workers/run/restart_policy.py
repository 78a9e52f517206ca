"""When to give up: how often a role may die, and how long a run may stand still."""

import random
import time
from collections import deque

from stream.operator.run_status import RunStatus
from workers.runtime.exit_codes import ExitCode
from workers.settings import Queue

RESTART_WINDOW_S = 600.0
MAX_QUICK_EXITS = 3
"""So many quick ends in a row, by its own doing, and a role is not started again."""
QUICK_EXIT_S = 10.0


class RestartPolicy:
    """How often one process was restarted, and whether it may be once more.

    Args:
        queue: the budget, and the first back-off.
    """

    def __init__(self, queue: Queue) -> None:
        self.total = 0
        self._limit = queue.max_restarts
        self._backoff_s = queue.retry_delay_s
        self._recent: deque[float] = deque()
        self._quick_exits = 0

    def decide(self, code: int, uptime_s: float, now: float | None = None) -> float | str:
        """Judge an unexpected end.

        Args:
            code: the exit code, negative for a signal.
            uptime_s: how long the process had run.
            now: monotonic time in seconds.

        Returns:
            Seconds to wait before the next start, or why there will be none.
        """
        now = time.monotonic() if now is None else now
        # A killed process says nothing about whether it works; one that ends by itself, at once and again, does.
        self._quick_exits = self._quick_exits + 1 if code >= 0 and uptime_s < QUICK_EXIT_S else 0
        if self._quick_exits >= MAX_QUICK_EXITS:
            return f"it ended within {QUICK_EXIT_S:g} s of its start {self._quick_exits} times in a row"
        if code == ExitCode.RECYCLE:
            return 0.0  # it worked, until user code had used it up: no crash
        while self._recent and now - self._recent[0] > RESTART_WINDOW_S:
            self._recent.popleft()
        if len(self._recent) >= self._limit:
            return f"it was restarted {len(self._recent)} times within {RESTART_WINDOW_S / 60:g} minutes (queue.max_restarts)"
        self._recent.append(now)
        self.total += 1
        return float(random.uniform(0.5, 1.0) * self._backoff_s * min(2.0 ** (len(self._recent) - 1), 60.0))


class StallDetector:
    """Nothing trained, dropped or evaluated for so long, while there is work and the run is not paused.

    Args:
        timeout_s: for how long.
        now: monotonic time in seconds.
    """

    def __init__(self, timeout_s: float, now: float | None = None) -> None:
        self._timeout_s = timeout_s
        self._since = time.monotonic() if now is None else now
        self._ended: tuple[int, ...] = ()

    def observe(self, view: RunStatus | None, now: float | None = None) -> str:
        """Look at the run, None before it has begun; returns the alarm, empty while there is none."""
        now = time.monotonic() if now is None else now
        if view is None:
            return f"the run had not begun after {self._timeout_s:g} s" if now - self._since >= self._timeout_s else ""
        balance = view.balance
        evaluation = view.evaluation  # publications wait for it
        ended = (
            *(balance["trained"] + balance["dropped"] + balance["dead"],),
            *((evaluation.version, evaluation.unfinished) if evaluation else ()),
        )
        working = view.unfinished > 0 or view.feed.get("done") != "1"
        if ended != self._ended or not working or view.paused:
            self._ended, self._since = ended, now
        if now - self._since < self._timeout_s:
            return ""
        return (
            f"nothing was trained or dropped for {self._timeout_s:g} s (abort.stall_timeout_s), while {view.unfinished} prompts are "
            f"open: {'; '.join(_describe_stages(view))}"
        )


def _describe_stages(view: RunStatus) -> list[str]:
    """What each stage holds, and who has it."""
    told = []
    for name, stage in view.stages.items():
        who = ", ".join(f"{consumer} {count}" for consumer, count in sorted(stage.consumers.items()) if count)
        held = f"{stage.claimed} held by {who}" if who else f"{stage.claimed} held"
        told.append(f"{name} has {stage.lag} waiting, {held}, {stage.delayed} given back")
    if view.feed.get("done") != "1":
        told.append("feed has not fed everything yet")
    return told
