"""Detects a run that makes no progress although there is work."""

import time
from collections.abc import Sequence

from stream.operator.status import RunStatus, describe_stages
from stream.queue.in_flight import GroupInFlight


class StallDetector:
    """Raises an alarm when nothing was trained, dropped or evaluated for too long, unless the run is paused or idle.

    Args:
        timeout_s: longest time without progress.
        now: monotonic time in seconds.
    """

    def __init__(self, timeout_s: float, now: float | None = None) -> None:
        self._timeout_s = timeout_s
        self._progress_at = time.monotonic() if now is None else now
        self._progress: tuple[int, ...] = ()

    def observe(self, status: RunStatus | None, now: float | None = None) -> str:
        """Compare a run's status with the one before.

        Args:
            status: the current status; None before the run has begun.
            now: monotonic time in seconds.

        Returns:
            The text of the alarm, with the stages that hold work and the workers that claimed it; empty: no alarm.
        """
        now = time.monotonic() if now is None else now
        if status is None:
            is_late = now - self._progress_at >= self._timeout_s
            return f"the run had not begun after {self._timeout_s:g} s" if is_late else ""
        progress = _progress(status)
        has_work = status.unfinished > 0 or status.feed.get("done") != "1"
        if progress != self._progress or not has_work or status.paused:
            self._progress, self._progress_at = progress, now
        if now - self._progress_at < self._timeout_s:
            return ""
        return (
            f"nothing was trained or dropped for {self._timeout_s:g} s (abort.stall_timeout_s), while "
            f"{status.unfinished} prompts are unfinished: {describe_stages(status)}"
        )


def describe_longest(groups: Sequence[GroupInFlight], now: float) -> str:
    """Describe what has gone on for longest, for the end of an alarm.

    Args:
        groups: in flight, the longest unchanged first.
        now: Unix time in seconds.
    """
    if not groups:
        return ""
    group = groups[0]
    longest = min(group.completions, key=lambda each: each.since, default=None)
    activity = " ".join(filter(None, [longest.activity, longest.detail])) if longest else group.activity
    where = f" of {group.environment}" if group.environment else ""
    seconds = now - group.unchanged_since
    return f"; {group.prompt}{where} has been in {activity or 'work'} for {seconds:.0f} s ({group.worker})"


def _progress(status: RunStatus) -> tuple[int, ...]:
    """Return numbers that change whenever a group or an evaluation ends, or a death is charged to a prompt."""
    balance, evaluation = status.balance, status.evaluation
    ended = balance["trained"] + balance["dropped"] + balance["dead"]
    deaths = status.counts.get("deaths", 0)  # each brings one prompt nearer to its end, so they are not many
    return (ended, deaths, evaluation.version, evaluation.unfinished) if evaluation else (ended, deaths)
