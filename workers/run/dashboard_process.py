"""The dashboard of a run: a process that may fail without any effect on the run."""

from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.to_thread
import structlog

from stream.errors import RunFailedError
from stream.waiting import Backoff
from workers.run.child_processes import ChildProcess, describe_exit
from workers.run.role_specs import dashboard_spec
from workers.settings import Settings

log = structlog.get_logger()

_MAX_STARTS = 3
_BACKOFF = Backoff(1.0, 10.0)


class DashboardProcess:
    """Keeps the dashboard of a run running, within limits.

    Args:
        settings: of the run.
        log_folder: folder of its log.
        show: called once with the pages' URL, and with the reason if there are none.
    """

    def __init__(self, settings: Settings, log_folder: Path, show: Callable[[str], None]) -> None:
        self.child = ChildProcess(dashboard_spec(settings), log_folder)
        self._show = show
        self._is_stopping = False

    def stop(self) -> None:
        """Do not start it again."""
        self._is_stopping = True

    async def keep_running(self) -> None:
        """Start the dashboard, and again if it fails; give up after a few times."""
        shown = False

        def announce(url: str) -> None:
            nonlocal shown
            if not shown:
                shown = True
                self._show(f"dashboard {url}")

        try:
            for attempt in range(1, _MAX_STARTS + 1):
                code = await self._run(announce)
                if code == 0 or self._is_stopping:
                    return
                await anyio.sleep(_BACKOFF.delay_s(attempt))
            why = await anyio.to_thread.run_sync(self.child.last_error)
            self._show(f'no dashboard: {why} (run.dashboard = "off" starts none)')
        finally:
            self.child.exited.set()

    async def _run(self, announce: Callable[[str], None]) -> int:
        try:
            code = await self.child.run(announce)
        except RunFailedError as error:
            log.warning("dashboard.failed", why=str(error))
            return 1
        if code and not self._is_stopping:
            log.warning("dashboard.exited", how=describe_exit(code))
        return code
