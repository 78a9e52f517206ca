"""The processes of a run together: awaited, asked to leave, killed where they do not."""

from collections.abc import Collection, Iterable

import anyio
import structlog

from workers.run.child import Child

log = structlog.get_logger()


class Children:
    """All of them, in the order in which they were first started.

    Args:
        leave_s: how long one may take to leave when it is asked to.
    """

    def __init__(self, leave_s: float) -> None:
        self.killed: list[str] = []
        """Names of those that had to be."""
        self._leave_s = leave_s
        self._all: list[Child] = []

    def add(self, child: Child) -> None:
        """One more."""
        self._all.append(child)

    async def trim_logs(self) -> None:
        """Cut the logs that have grown too large."""
        for child in self._all:
            await anyio.to_thread.run_sync(child.trim_log)

    async def left(self, roles: Collection[str]) -> None:
        """Wait until all of these roles have left for good."""
        await _left(self._of(roles))

    async def retire(self, roles: Collection[str]) -> None:
        """Ask all of these roles to stop, and kill those that do not in time."""
        children = self._of(roles)
        for child in children:
            child.terminate()
        with anyio.move_on_after(self._leave_s):
            await _left(children)
        late = [child for child in children if not child.left.is_set()]
        for child in late:
            log.warning("role.killed", name=child.spec.name)
            self._kill(child)
        await _left(late)

    def kill(self) -> None:
        """Kill everything that has not left."""
        for child in self._all:
            if not child.left.is_set():
                self._kill(child)

    def _of(self, roles: Collection[str]) -> list[Child]:
        return [child for child in self._all if child.spec.role in roles]

    def _kill(self, child: Child) -> None:
        self.killed.append(child.spec.name)
        child.kill()


async def _left(children: Iterable[Child]) -> None:
    for child in children:
        await child.left.wait()
