"""Decide whether a process that exited is restarted, and after which delay."""

import signal
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Final

from msgspec import Struct

from stream.waiting import Backoff
from workers.role.exit_codes import ExitCode
from workers.settings import Queue

MAX_RESTARTS: Final = 5
"""Restarts of one process within `RESTART_WINDOW_S`, not counting kills from outside, and deaths of workers that held
entries."""
RESTART_WINDOW_S: Final = 600.0
QUICK_EXIT_S = 10.0
MAX_QUICK_EXITS: Final = 3
"""Exits in a row within `QUICK_EXIT_S` of a start, after which a process is not restarted."""
MAX_LOST_IN_A_ROW: Final = 100
"""Prompts that deaths of workers may cost in a row, before the fault is not the prompts' but everywhere."""
_MAX_KILL_BACKOFF: Final = 3
"""After this many kills in a row the delay does not grow any more."""
_OUTSIDE = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}
"""Exit codes of a process that was killed from outside; other signals are raised by a process's own defects."""
_MAX_BACKOFF: Final = 60.0
"""Longest delay before a restart, as a multiple of the first."""


class Restart(Struct, frozen=True):
    """Restart the process after a delay."""

    delay_s: float


class GiveUp(Struct, frozen=True):
    """Do not restart the process; the run fails."""

    reason: str


class RestartPolicy:
    """Counts the restarts of one process.

    Args:
        queue: settings with the delay before the first restart.
    """

    def __init__(self, queue: Queue) -> None:
        self._backoff = Backoff(queue.retry_delay_s, queue.retry_delay_s * _MAX_BACKOFF)
        self._recent: deque[float] = deque()
        self._quick_exits = 0
        self._quick_kills = 0

    def decide(
        self,
        code: int,
        uptime_s: float,
        now: float | None = None,
        *,
        killed_from_outside: bool = False,
        held_work: bool = False,
    ) -> Restart | GiveUp:
        """Decide whether to restart the process after an unexpected exit.

        Args:
            code: exit code, negative for a signal.
            uptime_s: seconds that the process ran.
            killed_from_outside: see `was_killed_from_outside`. Such an exit is not counted: the process has no defect.
                A run that makes no progress because of it ends after `abort.stall_timeout_s`.
            held_work: a worker held entries when it ended. Such an exit is not counted either: its death is counted for
                the entries (`stream.operator.control`), and each of them has a limit.
            now: monotonic time in seconds; default: the current time.
        """
        if code in (ExitCode.USAGE, ExitCode.PERMANENT):
            return GiveUp("a restart would not help")
        now = time.monotonic() if now is None else now
        if held_work:
            return Restart(self._backoff.delay_s(1))
        # Quick exits in a row indicate a defect of the process. A kill by a signal does not, so it resets the count.
        self._quick_exits = self._quick_exits + 1 if code >= 0 and uptime_s < QUICK_EXIT_S else 0
        if self._quick_exits >= MAX_QUICK_EXITS:
            return GiveUp(f"it ended within {QUICK_EXIT_S:g} s of its start {self._quick_exits} times in a row")
        if code == ExitCode.RECYCLE:
            return Restart(0.0)
        if killed_from_outside:
            self._quick_kills = self._quick_kills + 1 if uptime_s < QUICK_EXIT_S else 1
            return Restart(self._backoff.delay_s(min(self._quick_kills, _MAX_KILL_BACKOFF)))
        while self._recent and now - self._recent[0] > RESTART_WINDOW_S:
            self._recent.popleft()
        if len(self._recent) >= MAX_RESTARTS:
            minutes = RESTART_WINDOW_S / 60
            return GiveUp(f"it was restarted {MAX_RESTARTS} times within {minutes:g} minutes")
        self._recent.append(now)
        return Restart(self._backoff.delay_s(len(self._recent)))


class FutileDeaths:
    """Notices that a role loses prompt after prompt to deaths of its workers and completes none: it is broken."""

    def __init__(self) -> None:
        self._completed = -1
        self._lost = 0

    def observe(self, completed: int, lost: int) -> bool:
        """Return whether `MAX_LOST_IN_A_ROW` prompts were lost since the last one was completed.

        Args:
            completed: groups that have passed the role so far.
            lost: prompts that have just become dead letters because their workers died.
        """
        if completed != self._completed:
            self._completed, self._lost = completed, 0
        self._lost += lost
        return self._lost >= MAX_LOST_IN_A_ROW


def was_killed_from_outside(code: int, oom_kills_before: int) -> bool:
    """Return whether the process was killed from outside: by an operator, a scheduler, a chaos test.

    The kernel, too, kills with SIGKILL, when memory is exhausted; that is the process's own doing.

    Args:
        code: exit code, negative for a signal.
        oom_kills_before: `count_oom_kills` at the start of the process.
    """
    return code in _OUTSIDE and count_oom_kills() == oom_kills_before


def count_oom_kills() -> int:
    """Return how many processes the kernel of this machine has killed for lack of memory; 0 where it does not tell."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
