"""One Python program for each call, in a new sandbox that ends with it.

::

    source ─► bwrap (nothing of this machine but the system's files) ─► resource_limits ─► interpreter -I -S main.py

Where this machine makes no sandboxes, the program has the limits alone: it can then use the network, read the worker's
files and the environment of processes of its user, and signal them. Where that would give it a container engine or a
cluster (`engine_access`), or it would run as root, there is no runner.
"""

import functools
import json
import os
import shutil
import signal
import stat
import sys
import sysconfig
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final
from urllib.parse import urlsplit

import anyio
from anyio import to_thread
from anyio.abc import Process
from msgspec import Struct

from envs.sandboxes import resource_limits
from envs.sandboxes.bubblewrap import (
    NOBODY,
    WORKDIR,
    BubblewrapSpec,
    Launch,
    interpreter_paths,
    is_open_to_all,
    launch,
    sandbox_problem,
)
from stream.errors import EnvironmentFailure, ReferenceNotFoundError

_EXIT_TIMEOUT_S: Final = 5.0
"""Time for a killed process to exit."""
_START_TIMEOUT_S: Final = 30.0
"""Time for a process to start the program."""
_MAX_REPORT_BYTES: Final = 10_000
_FILES_PER_FOLDER: Final = 4
"""A sandbox's working folder holds this many files of the largest size, and so does its `/tmp`."""
_SANDBOX_PROCESSES: Final = 2
"""Processes that count towards the limit in a sandbox besides those that the code starts: bwrap and the code itself."""
_SIGNALLED: Final = 128
"""A larger exit code means that a signal ended the sandboxed program: this number plus the signal's."""
ENGINE_ACCESS: Final = (
    "/var/run/docker.sock",
    "/run/docker.sock",
    "/run/podman/podman.sock",
    "/run/containerd/containerd.sock",
    "/run/crio/crio.sock",
    "/var/run/secrets/kubernetes.io/serviceaccount/token",
)
"""Sockets and tokens by which a program commands the machine that the worker runs on."""


class RunnerLimits(Struct, frozen=True, kw_only=True):
    """Limits of each program."""

    timeout_s: float = 10.0
    """Wall time."""
    cpu_s: int = 10
    """Seconds of processor time."""
    memory_mb: int = 512
    """Address space."""
    file_mb: int = 16
    """Size of each file that it writes, and of its output."""
    processes: int = 0
    """Processes and threads that it may start. In a sandbox, above 0 this has no effect for root whose interpreter
    others cannot read."""
    output_chars: int = 4000
    """Characters of its output that are kept; the middle is cut."""


@dataclass(frozen=True)
class RunnerResult:
    """How a program ended."""

    code: int
    """Exit code; -N after signal N."""
    timed_out: bool
    output: str
    """What it wrote to both of its streams."""


@dataclass(frozen=True)
class _Started:
    """What one program needs of the machine."""

    launch: Launch
    output: BinaryIO
    """An unnamed file, which the program cannot open by a path."""
    folder: Path | None
    """Without a sandbox: where it runs."""


class PythonRunner:
    """Runs Python programs, without packages and with nothing kept between them. Its constructor may block.

    Args:
        interpreter: the Python that runs them, without site packages.
        limits: of each.

    Raises:
        ReferenceNotFoundError: this machine makes no sandboxes, and a program would command the machine.
    """

    def __init__(self, interpreter: str, limits: RunnerLimits) -> None:
        self.limits = limits
        self.interpreter = interpreter
        self._is_sandboxed = not (problem := sandbox_problem())
        self._user = None if self._is_sandboxed else user_without_sandbox(interpreter)
        if problem and (found := engine_access(self._user)):
            raise ReferenceNotFoundError(
                f"the model's code would have {found}, and with it this machine or cluster, because this machine makes "
                f"no sandboxes: {problem}. Make sandboxes possible, or start the worker without that file"
            )

    async def run(self, source: bytes) -> RunnerResult:
        """Run a program to its end, or to its deadline.

        Raises:
            EnvironmentFailure: it could not be started, which is not its own fault.
        """
        started = await to_thread.run_sync(self._prepare, source)
        try:
            code, timed_out = await self._run(started)
            output = await to_thread.run_sync(self._read_output, started.output)
        finally:
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(_remove, started)
        return RunnerResult(code, timed_out, output)

    def _prepare(self, source: bytes) -> _Started:
        """Make a file for the output, and what starts the program: a sandbox, or a folder."""
        file_bytes, processes = self.limits.file_mb << 20, self.limits.processes
        limits = {
            "cpu_s": self.limits.cpu_s,
            "memory_bytes": self.limits.memory_mb << 20,
            "file_bytes": file_bytes,
            "processes": processes + _SANDBOX_PROCESSES if self._is_sandboxed and processes else processes,
            "files": 64,
            "core": 0,
        }
        if self._user is not None:
            limits["user"] = self._user
        limited = [self.interpreter, "-I", "-S", resource_limits.__file__, json.dumps(limits)]
        program = [*limited, self.interpreter, "-I", "-S", "-u", "-X", "utf8", "main.py"]
        try:
            output = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `_remove`)
            if self._is_sandboxed:
                spec = BubblewrapSpec(
                    readable=(*interpreter_paths(self.interpreter), resource_limits.__file__),
                    folder_bytes=_FILES_PER_FOLDER * file_bytes,
                    starts_processes=processes > 0,
                )
                return _Started(launch(program, spec, {f"{WORKDIR}/main.py": source}), output, None)
            folder = Path(tempfile.mkdtemp(prefix="penstock-python-"))
            file = folder / "main.py"
            file.write_bytes(source)
            file.chmod(0o644)
            if self._user is not None:
                os.chown(folder, self._user, self._user)
            return _Started(Launch(program, {"cwd": folder, "env": {}}), output, folder)
        except OSError as error:
            raise EnvironmentFailure(f"the sandbox has no folder to run in: {error}") from error

    async def _run(self, started: _Started) -> tuple[int, bool]:
        """Run the program until it ends or its deadline passes; return its exit code, and whether that was it."""
        command, options = started.launch.command, started.launch.options
        try:
            with anyio.CancelScope(shield=True):  # cancelled half-way, the process would leak
                process = await anyio.open_process(
                    command, stdin=None, stderr=started.output, start_new_session=True, **options
                )
        except OSError as error:
            raise EnvironmentFailure(f"the sandbox cannot start a process: {error}") from error
        try:
            await self._wait_started(process, started.output)
            with anyio.move_on_after(self.limits.timeout_s):
                code = await process.wait()
                return _SIGNALLED - code if self._is_sandboxed and code > _SIGNALLED else code, False
            return -signal.SIGKILL, True
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # and the processes it started
            with anyio.CancelScope(shield=True), anyio.move_on_after(_EXIT_TIMEOUT_S):
                await process.aclose()

    async def _wait_started(self, process: Process, output: BinaryIO) -> None:
        """Wait until the program starts.

        Raises:
            EnvironmentFailure: it does not start, which is not the model's fault.
        """
        assert process.stdout is not None  # noqa: S101  (a pipe)
        found = b""
        with anyio.move_on_after(_START_TIMEOUT_S):
            with suppress(anyio.EndOfStream):
                while not found.endswith(b"\n") and len(found) < _MAX_REPORT_BYTES:  # `bwrap` keeps the pipe open
                    found += await process.stdout.receive()
            if found != b"begun\n":
                said = await to_thread.run_sync(self._read_output, output)  # by bwrap
                why = found.decode(errors="replace").strip() or said.strip() or "its process ended"
                raise EnvironmentFailure(f"the sandbox cannot start: {why}")
            return
        raise EnvironmentFailure(f"the sandbox did not start within {_START_TIMEOUT_S:g} s")

    def _read_output(self, output: BinaryIO) -> str:
        """Return the output; of a long output its beginning and end."""
        size = output.seek(0, os.SEEK_END)
        output.seek(0)
        most = 4 * self.limits.output_chars  # UTF-8 needs at most four bytes for a character
        if size <= 2 * most:
            text = output.read().decode(errors="replace")
            if len(text) <= self.limits.output_chars:
                return text
            head, tail = text, text
        else:
            head = output.read(most).decode(errors="replace")
            output.seek(size - most)
            tail = output.read().decode(errors="replace")
        half = self.limits.output_chars // 2
        return f"{head[:half]}\n... {size} bytes in all ...\n{tail[-half:]}"


def _remove(started: _Started) -> None:
    started.output.close()
    started.launch.close()
    if started.folder is not None:
        shutil.rmtree(started.folder, ignore_errors=True)


@functools.cache
def user_without_sandbox(interpreter: str) -> int | None:
    """Return the user to become before a program runs without a sandbox; None: this process's own.

    Limits on processes do not apply to root, who may also read every file, so root becomes nobody.

    Raises:
        ReferenceNotFoundError: nobody cannot read the interpreter.
    """
    if os.geteuid() != 0:
        return None
    needed = [interpreter, os.path.realpath(interpreter)]
    if interpreter == sys.executable:
        needed.append(sysconfig.get_path("stdlib"))
    for path in map(Path, needed):
        if path.exists() and not is_open_to_all(path):
            raise ReferenceNotFoundError(
                f"the model's code would run as root: this machine makes no sandboxes, and the user nobody cannot read "
                f"{path}. Make sandboxes possible, start the worker as another user, or set `interpreter` to a Python "
                "that all users can read"
            )
    return NOBODY


def engine_access(user: int | None) -> str:
    """Return a socket or a token of `ENGINE_ACCESS` that a program could use; empty if there is none. Blocks.

    Args:
        user: as whom it runs; None: this process's.
    """
    named = [urlsplit(os.environ.get(name, "")) for name in ("DOCKER_HOST", "CONTAINER_HOST")]
    sockets = [url.path for url in named if url.scheme == "unix"]
    rootless = f"/run/user/{os.geteuid()}"
    for path in (*sockets, f"{rootless}/docker.sock", f"{rootless}/podman/podman.sock", *ENGINE_ACCESS):
        with suppress(OSError):
            mode = Path(path).stat().st_mode
            needed = os.W_OK if stat.S_ISSOCK(mode) else os.R_OK
            if mode & needed if user is not None else os.access(path, needed):
                return path
    return ""
