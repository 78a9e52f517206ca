"""Start the processes of a run from a fork server if possible, else as new interpreters."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio
import anyio.to_thread
import structlog

from stream import parent_death
from stream.errors import RunFailedError
from workers.run.fork_server import ForkServer
from workers.run.program import Program
from workers.run.role_specs import RoleSpec

log = structlog.get_logger()

_POLL_S = 0.05
"""Seconds between two polls of a process, on systems without pidfds."""


class LaunchedProcess:
    """A child process that leads its own process group.

    Args:
        pid: process id.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        """Exit code, negative for a signal; None until `wait` has returned."""
        self._pidfd = os.pidfd_open(pid) if sys.platform == "linux" else None

    async def wait(self) -> int:
        """Wait until the process exits. Returns the exit code."""
        while self.returncode is None:
            if self._pidfd is not None:
                await anyio.wait_readable(self._pidfd)
            ended, status = os.waitpid(self.pid, os.WNOHANG)  # noqa: ASYNC222  (does not block)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
            else:
                await anyio.sleep(_POLL_S)
        return self.returncode

    def terminate(self) -> None:
        """Send SIGTERM, unless `wait` has already returned."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill_group(self) -> None:
        """Kill the whole process group, even if its leader has exited."""
        with suppress(ProcessLookupError, PermissionError):  # the group is empty (macOS raises the second)
            os.killpg(self.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Kill the process group, wait for the process, and close its pidfd."""
        self.kill_group()
        with anyio.CancelScope(shield=True):
            await self.wait()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


class ProcessLauncher:
    """Starts processes that die with this one; a context manager that closes its fork servers.

    Roles that need the same modules share one fork server, so that no role holds modules that it does not use.
    """

    def __init__(self) -> None:
        self._fork_servers: dict[tuple[str, ...], ForkServer | None] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self._fork_servers.values():
            if server is not None:
                server.close()

    def preload(self, modules: tuple[str, ...], hints: tuple[str, ...] = ()) -> None:
        """Start a fork server that imports these modules in the background; no effect outside Linux.

        Args:
            modules: of a role.
            hints: modules that the role's processes will import, if they exist; no process waits for them. Empty
                names are skipped.
        """
        if not modules or sys.platform != "linux":
            return
        if modules not in self._fork_servers:
            self._fork_servers[modules] = ForkServer.start(modules)
        if (server := self._fork_servers[modules]) and (names := tuple(filter(None, hints))):
            server.preload(names)

    async def launch(self, spec: RoleSpec, output: int) -> LaunchedProcess:
        """Start a process.

        Args:
            spec: command line and environment.
            output: descriptor for standard output and standard error.

        Raises:
            RunFailedError: the process cannot be started.
        """
        try:
            pid = await self._fork(spec, output) or self._execute(spec, output)
        except OSError as error:
            raise RunFailedError(f"{spec.name} cannot be started: {error}") from error
        return LaunchedProcess(pid)

    async def _fork(self, spec: RoleSpec, output: int) -> int | None:
        """Start a process from a fork server. Returns its process id, or None if no fork server can start it."""
        self.preload(spec.modules)
        server = ForkServer.inherited() or self._fork_servers.get(spec.modules)
        program = Program.parse(spec.command)
        if server is None or program is None:
            return None

        def spawn() -> int:
            return server.spawn(
                program,
                environment={**os.environ, **spec.environment},
                folder=Path.cwd(),
                output=(output, output),
                modules=spec.modules,
            )

        try:
            return await anyio.to_thread.run_sync(spawn)  # not cancellable, so that no started process is lost
        except OSError as error:
            log.warning("fork_server.lost", why=str(error))
            self._fork_servers[spec.modules] = None
            return None

    @staticmethod
    def _execute(spec: RoleSpec, output: int) -> int:
        """Start a new interpreter. Returns its process id.

        Call it on the main thread: the kernel's parent-death signal fires when the thread that started the child ends.
        """
        process = subprocess.Popen(  # noqa: S603  (the command line is built by Penstock)
            (sys.executable, "-I", "-S", str(parent_death.__file__), *spec.command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **spec.environment},
            start_new_session=True,  # Ctrl-C reaches only this process, which stops the roles in order
        )
        process.returncode = 0  # `LaunchedProcess` waits for the process, so `Popen` must not
        return process.pid
