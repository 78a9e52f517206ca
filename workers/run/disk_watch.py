"""Says when a disk of a run is full, and when it has room again: the run waits meanwhile."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import structlog

from stream.disk_space import DiskProblem, end_waits, waiting
from stream.operator.status import RunStatus
from workers.runs.folder import disk_problems

log = structlog.get_logger()

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
                await self._look()
                await anyio.sleep(_INTERVAL_S)
        finally:
            end_waits()

    async def _look(self) -> None:
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
