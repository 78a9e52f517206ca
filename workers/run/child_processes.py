"""All child processes of a run: wait for them, stop them, and kill those that do not stop in time."""

from collections.abc import Collection, Iterable

import anyio
import structlog

from envs.call.call_memory import RunningCall
from stream.causes import ErrorCause
from workers.run.child_process import ChildProcess
from workers.run.role_specs import RoleSpec

log = structlog.get_logger()


class ChildProcesses:
    """The child processes of a run, in the order in which they were added.

    Args:
        stop_timeout_s: seconds between SIGTERM and SIGKILL.
    """

    def __init__(self, stop_timeout_s: float) -> None:
        self.killed: list[str] = []
        """Names of the processes that were killed."""
        self._stop_timeout_s = stop_timeout_s
        self._all: list[ChildProcess] = []

    def add(self, child: ChildProcess) -> None:
        """Add a process."""
        self._all.append(child)

    def running_specs(self) -> list[RoleSpec]:
        """Return the specs of processes that run or restart. Callable from any thread."""
        return [child.spec for child in list(self._all) if not child.exited.is_set()]

    def count_running(self, role: str) -> int:
        """Return how many processes of a role run or restart. Callable from any thread."""
        return sum(spec.role == role for spec in self.running_specs())

    async def trim_logs(self) -> None:
        """Trim every log that is too large."""
        for child in self._all:
            await anyio.to_thread.run_sync(child.trim_log)

    def running_calls(self) -> list[tuple[str, RunningCall]]:
        """Return the calls of user code that processes are in, each with the name of its process."""
        return [(child.spec.name, call) for child in self._all for call in child.running_calls()]

    async def blocking_code(self, within_s: float) -> ErrorCause | None:
        """Return the code that last blocked the event loop of a process, if its log says so for the last seconds."""
        found = [await anyio.to_thread.run_sync(child.blocking_code, within_s) for child in self._all]
        return next((cause for cause in found if cause is not None), None)

    async def new_blocking_codes(self, within_s: float) -> list[ErrorCause]:
        """Return the code that blocks the event loop of each process whose log has changed since the last call."""

        def find() -> list[ErrorCause]:
            found = [child.new_blocking_code(within_s) for child in list(self._all)]
            return [cause for cause in found if cause is not None]

        return await anyio.to_thread.run_sync(find)

    async def wait_exited(self, roles: Collection[str]) -> None:
        """Wait until no process of these roles runs or restarts."""
        await _wait_exited(self._of(roles))

    async def stop(self, roles: Collection[str]) -> None:
        """Terminate all processes of these roles, and kill those that do not exit in time."""
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
        """Kill every process that has not exited."""
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
