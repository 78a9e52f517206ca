"""An environment whose tool runs the model's Python in a sandbox with limits.

Each call starts a new interpreter in a sandbox of its own (`envs.sandboxes.bubblewrap`): no network, no process but its
own, no environment variable of the worker, the system's files and the interpreter's library to read, an empty folder to
write. Limited: CPU time, wall time, memory, size of files and output, new processes. Not available: packages.

Where this machine makes no sandboxes, the log says so and the code runs with these limits alone: it can then use the
network, read the worker's files and the environment of processes of its user, and signal them. Root switches to the
user nobody there, if that user can read the interpreter.
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
from typing import Any, BinaryIO, ClassVar

import anyio
import structlog
from anyio import to_thread
from anyio.abc import Process

from envs.sandboxes import resource_limits
from envs.sandboxes.bubblewrap import (
    NOBODY,
    WORKDIR,
    BubblewrapSpec,
    Launch,
    interpreter_paths,
    launch,
    sandbox_problem,
    warn_without_sandbox,
)
from stream.errors import EnvironmentFailure

log = structlog.get_logger()

_EXIT_TIMEOUT_S = 5.0
"""Time for a killed process to exit."""
_START_TIMEOUT_S = 30.0
"""Time for a process to start the model's code."""
_MAX_REPORT_BYTES = 10_000
_FILES_PER_FOLDER = 4
"""A sandbox's working folder holds this many files of the largest size, and so does its `/tmp`."""
_SANDBOX_PROCESSES = 2
"""Processes that count towards the limit in a sandbox besides those that the code starts: bwrap and the code itself."""
_SIGNALLED = 128
"""A larger exit code means that a signal ended the sandboxed program: this number plus the signal's."""


@dataclass(frozen=True)
class SandboxRun:
    """One tool call."""

    code: str
    output: str


@dataclass(frozen=True)
class _Started:
    """What one call needs of the machine."""

    launch: Launch
    output: BinaryIO
    """An unnamed file, which the code cannot open by a path."""
    folder: Path | None
    """Without a sandbox: where the code runs."""


class Python:
    """Run Python code. No state is kept between calls.

    Args:
        timeout_s: wall time of one call.
        cpu_s: CPU seconds of one call.
        memory_mb: address space of one call.
        file_mb: size of each file that the code writes.
        output_chars: characters of the output that the model reads; the middle is cut.
        processes: processes and threads that the code may start. Above 0 it has no effect for root whose interpreter
            others cannot read.
        interpreter: the Python that runs the code, without site packages.
    """

    without_sandbox: ClassVar[str] = (
        "the model's code runs with limits alone: it can use the network, read the worker's files and the environment "
        "of processes of its user, and signal them"
    )

    replayable = True

    def __init__(
        self,
        timeout_s: float = 10.0,
        cpu_s: int = 10,
        memory_mb: int = 512,
        file_mb: int = 16,
        output_chars: int = 4000,
        processes: int = 0,
        interpreter: str = sys.executable,
    ) -> None:
        self.runs: list[SandboxRun] = []
        self._timeout_s = timeout_s
        self._output_chars = output_chars
        self._limits = {
            "cpu_s": cpu_s,
            "memory_bytes": memory_mb << 20,
            "file_bytes": file_mb << 20,
            "processes": processes,
            "files": 64,
            "core": 0,
        }
        self._interpreter = interpreter
        self._is_sandboxed = not sandbox_problem()
        warn_without_sandbox("python", self.without_sandbox)
        user = None if self._is_sandboxed else sandbox_user(interpreter)
        if user is not None:
            self._limits["user"] = user

    def reset(self, **row: Any) -> None:  # noqa: ARG002
        """Start an episode; the task is in the prompt."""
        self.runs = []

    async def python(self, code: str) -> str:
        """Run Python code in a fresh interpreter, and read what it printed.

        Args:
            code: A whole program. Only what it prints is seen; nothing is kept for the next call.
        """
        started = await to_thread.run_sync(self._prepare, code)
        try:
            ending = await self._run(started)
            printed = await to_thread.run_sync(self._read_output, started.output)
        finally:
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(_remove, started)
        text = "\n".join(filter(None, [printed.rstrip("\n"), ending])) or "(no output)"
        self.runs.append(SandboxRun(code, text))
        return text

    def _prepare(self, code: str) -> _Started:
        """Make a file for the output, and what starts the code: a sandbox, or a folder with the program."""
        source = code.encode("utf-8", "replace")
        limits = dict(self._limits)
        if self._is_sandboxed and limits["processes"]:
            limits["processes"] += _SANDBOX_PROCESSES
        limited = [self._interpreter, "-I", "-S", resource_limits.__file__, json.dumps(limits)]
        program = [*limited, self._interpreter, "-I", "-S", "-u", "-X", "utf8", "main.py"]
        try:
            output = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `_remove`)
            if self._is_sandboxed:
                spec = BubblewrapSpec(
                    readable=(*interpreter_paths(self._interpreter), resource_limits.__file__),
                    folder_bytes=_FILES_PER_FOLDER * self._limits["file_bytes"],
                    starts_processes=self._limits["processes"] > 0,
                )
                return _Started(launch(program, spec, {f"{WORKDIR}/main.py": source}), output, None)
            folder = Path(tempfile.mkdtemp(prefix="penstock-python-"))
            file = folder / "main.py"
            file.write_bytes(source)
            file.chmod(0o644)
            if "user" in self._limits:
                os.chown(folder, self._limits["user"], self._limits["user"])
            return _Started(Launch(program, {"cwd": folder, "env": {}}), output, folder)
        except OSError as error:
            raise EnvironmentFailure(f"the sandbox has no folder to run in: {error}") from error

    async def _run(self, started: _Started) -> str:
        """Run the program until it ends or its deadline passes; return a line on how it ended, empty for success."""
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
            with anyio.move_on_after(self._timeout_s):
                code = await process.wait()
                return _describe_exit(_SIGNALLED - code if self._is_sandboxed and code > _SIGNALLED else code)
            return f"TimeoutError: the code did not end within {self._timeout_s:g} s"
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # and the processes it started
            with anyio.CancelScope(shield=True), anyio.move_on_after(_EXIT_TIMEOUT_S):
                await process.aclose()

    async def _wait_started(self, process: Process, output: BinaryIO) -> None:
        """Wait until the model's code starts.

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
        most = 4 * self._output_chars  # UTF-8 needs at most four bytes for a character
        if size <= 2 * most:
            text = output.read().decode(errors="replace")
            if len(text) <= self._output_chars:
                return text
            head, tail = text, text
        else:
            head = output.read(most).decode(errors="replace")
            output.seek(size - most)
            tail = output.read().decode(errors="replace")
        half = self._output_chars // 2
        return f"{head[:half]}\n... {size} bytes in all ...\n{tail[-half:]}"


def _remove(started: _Started) -> None:
    started.output.close()
    started.launch.close()
    if started.folder is not None:
        shutil.rmtree(started.folder, ignore_errors=True)


def _describe_exit(code: int) -> str:
    """Describe an exit code for the model; empty for 0."""
    if code >= 0:
        return "" if code == 0 else f"(exit code {code})"
    names = {signal.SIGXCPU: "its processor time was over", signal.SIGKILL: "it was killed: too much processor time"}
    return f"(ended by {signal.Signals(-code).name}: {names.get(signal.Signals(-code), 'it crashed')})"


@functools.cache
def sandbox_user(interpreter: str) -> int | None:
    """Return the user id to switch to before running the model's code; None: no switch.

    Limits on processes do not apply to root, which may also read every file. So root switches to the user nobody, if
    that user can read the interpreter and its library.
    """
    if os.geteuid() != 0:
        return None
    needed = [interpreter, os.path.realpath(interpreter), resource_limits.__file__]
    if interpreter == sys.executable:
        needed.append(sysconfig.get_path("stdlib"))
    if all(_is_open_to_all(Path(path)) for path in needed):
        return NOBODY
    log.warning(
        "python_sandbox.runs_as_root", interpreter=interpreter, why="others than root cannot read the interpreter"
    )
    return None


def _is_open_to_all(path: Path) -> bool:
    readable = bool(path.stat().st_mode & stat.S_IROTH)
    return readable and all(parent.stat().st_mode & stat.S_IXOTH for parent in path.absolute().parents)
