"""The processes of a run together: awaited, asked to leave, killed where they do not."""

from collections.abc import Collection, Iterable

import anyio
import structlog

from workers.run.child_process import ChildProcess

log = structlog.get_logger()


class ChildProcesses:
    """All of them, in the order in which they were first started.

    Args:
        stop_timeout_s: how long one may take to leave when it is asked to.
    """

    def __init__(self, stop_timeout_s: float) -> None:
        self.killed: list[str] = []
        """Names of those that had to be."""
        self._stop_timeout_s = stop_timeout_s
        self._all: list[ChildProcess] = []

    def add(self, child: ChildProcess) -> None:
        """One more."""
        self._all.append(child)

    async def trim_logs(self) -> None:
        """Cut the logs that have grown too large."""
        for child in self._all:
            await anyio.to_thread.run_sync(child.trim_log)

    async def wait_exited(self, roles: Collection[str]) -> None:
        """Wait until all of these roles have left for good."""
        await _wait_exited(self._of(roles))

    async def stop(self, roles: Collection[str]) -> None:
        """Ask all of these roles to stop, and kill those that do not in time."""
        children = self._of(roles)
        for child in children:
            child.terminate()
        with anyio.move_on_after(self._stop_timeout_s):
            await _wait_exited(children)
        late = [child for child in children if not child.exited.is_set()]
        for child in late:
            log.warning("role.killed", name=child.spec.name)
            self._kill(child)
        await _wait_exited(late)

    def kill(self) -> None:
        """Kill everything that has not left."""
        for child in self._all:
            if not child.exited.is_set():
                self._kill(child)

    def _of(self, roles: Collection[str]) -> list[ChildProcess]:
        return [child for child in self._all if child.spec.role in roles]

    def _kill(self, child: ChildProcess) -> None:
        self.killed.append(child.spec.name)
        child.kill()


async def _wait_exited(children: Iterable[ChildProcess]) -> None:
    for child in children:
        await child.exited.wait()
