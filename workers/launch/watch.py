"""What a supervisor watches: progress, what limits the run, full disks; and one sampled completion every few steps.

A run that makes no progress although there is work is stalled. While a disk is full the run waits.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import structlog
from rich.text import Text

from stream.codec import decode
from stream.connection.run_connection import RunConnection
from stream.disk_space import DiskProblem, end_waits, waiting
from stream.errors import PenstockError
from stream.operator.bottleneck import Bottleneck
from stream.operator.status import RunStatus, describe_stages
from stream.operator.unfinished_groups import newest_scored_group
from stream.queue.in_flight import GroupInFlight
from stream.records import Completion, Group
from stream.trainer.archive import scan_archive
from stream.wording import escape_controls
from workers.runs.folder import disk_problems
from workers.runs.transcript import describe_reward
from workers.terminal.lines import compact_lines


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
    counts, evaluation = status.prompt_counts, status.evaluation
    ended = counts["trained"] + counts["dropped"] + counts["dead"]
    deaths = status.counts.get("deaths", 0)  # each brings one prompt nearer to its end, so they are not many
    return (ended, deaths, evaluation.version, evaluation.unfinished) if evaluation else (ended, deaths)


log = structlog.get_logger()

_WINDOW: Final = 30
"""Observations. Where rollouts and steps take turns the limit changes all the time, but not that of the majority."""


class BottleneckLog:
    """Logs `bottleneck.changed` when another part of the pipeline limits most of the last observations."""

    def __init__(self) -> None:
        self._recent: deque[tuple[str, str]] = deque(maxlen=_WINDOW)
        self._logged: tuple[str, str] | None = None

    def observe(self, found: Bottleneck) -> None:
        """Count an observation; call it about once a second."""
        self._recent.append((found.limit, found.name))
        now, count = Counter(self._recent).most_common(1)[0]
        if count > _WINDOW // 2 and now != self._logged and now == self._recent[-1]:
            self._logged = now
            log.info("bottleneck.changed", limit=found.limit, name=found.name or None, why=found.why)


_EVERY_STEPS = 5
_MIN_INTERVAL_S = 15.0
"""Fast runs show fewer samples."""


class SampleSchedule:
    """Decides when a running run shows a completion: after its first step, then every few steps.

    Args:
        every_steps: steps from one sample to the next, at least.
        min_interval_s: seconds from one sample to the next, at least.
    """

    def __init__(self, every_steps: int = _EVERY_STEPS, min_interval_s: float = _MIN_INTERVAL_S) -> None:
        self._every_steps, self._min_interval_s = every_steps, min_interval_s
        self._next_step = 1
        self._next_time = 0.0
        self._shown = 0

    async def next_sample(self, connection: RunConnection, status: RunStatus, width: int) -> list[Text]:
        """Return a completion of the group that was scored last, as lines; empty if none is due."""
        step = int(status.policy.get("step", 0))
        if step < self._next_step or time.monotonic() < self._next_time:
            return []
        group = await newest_scored_group(connection)
        if group is None or not group.completions:
            return []
        self._next_step = step + self._every_steps
        self._next_time = time.monotonic() + self._min_interval_s
        completion = group.completions[self._shown % len(group.completions)]
        self._shown += 1
        return sample_lines(group, completion, f"sample at step {step}", width)


def sample_lines(group: Group, completion: Completion, title: str, width: int) -> list[Text]:
    """Return a completion in compact form, under a line that names it."""
    name = f"{escape_controls(group.prompt.id)} #{completion.index}"
    head = Text(f"── {title}: {name}, reward {describe_reward(completion.reward)} ", "bold", no_wrap=True)
    head.append("─" * max(0, width - head.cell_len))
    return [head, *(line.rich_text() for line in compact_lines(completion, width=width)), Text()]


def newest_archived_group(folder: Path) -> Group | None:
    """Return the group that ended last, from the archive in a run's folder; None if none can be read."""
    offset = None
    for _, offset in scan_archive(folder / "groups"):  # noqa: B007
        pass
    try:
        return decode(offset.read_payload(), Group) if offset is not None else None
    except PenstockError:
        return None


_INTERVAL_S: Final = 2.0


class DiskWatch:
    """Looks at the disks of a run, whether or not its server answers.

    Args:
        folder: of the run.
        show: called with a line when a disk is found full, and when it has room again.
    """

    def __init__(self, folder: Path, show: Callable[[str], None]) -> None:
        self.problems: list[DiskProblem] = []
        """What is wrong now."""
        self.status: RunStatus | None = None
        """The run's last status, from the caller; None: its server does not answer."""
        self._folder = folder
        self._show = show

    async def run(self) -> None:
        """Look until cancelled; run it in the supervisor's task group. Then nothing in this process waits any more."""
        try:
            while True:
                await self._check_disks()
                await anyio.sleep(_INTERVAL_S)
        finally:
            end_waits()

    async def _check_disks(self) -> None:
        found = [*await anyio.to_thread.run_sync(disk_problems, self._folder, self.status), *waiting()]
        now = {problem.path: problem for problem in found}
        before = {problem.path for problem in self.problems}
        self.problems = list(now.values())
        for path in sorted(now.keys() - before):
            log.warning("disk.full", path=path, why=now[path].why, free_bytes=now[path].free_bytes)
            self._show(f"{now[path]}; make room there: the run waits, and goes on by itself")
        for path in sorted(before - now.keys()):
            log.info("disk.writable", path=path)
            self._show(f"the disk of {path} can be written again: the run goes on")
