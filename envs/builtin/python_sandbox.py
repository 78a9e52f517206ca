"""An environment whose tool runs the model's Python in a child process with limits.

Limited: CPU time, wall time, memory, size of files and output, new processes (root switches to the user nobody, if that
user can read the interpreter). Not available: the worker's environment variables, packages, memory, open files and
standard input. Each call starts a new interpreter in a temporary folder, which is removed afterwards.

Not limited: the network, and files that the user may read. The sandbox protects a worker from a policy's accidents, not
from an attacker. To run untrusted code, run the worker in a container without a network.
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
from typing import Any, BinaryIO

import anyio
import structlog
from anyio import to_thread
from anyio.abc import Process

from envs.processes import confine
from stream.errors import EnvironmentFailure

log = structlog.get_logger()

NOBODY = 65534
_EXIT_TIMEOUT_S = 5.0
"""Time for a killed process to exit."""
_START_TIMEOUT_S = 30.0
"""Time for a process to start the model's code."""


@dataclass(frozen=True)
class SandboxRun:
    """One tool call."""

    code: str
    output: str


class Python:
    """Run Python code. No state is kept between calls.

    Args:
        timeout_s: wall time of one call.
        cpu_s: CPU seconds of one call.
        memory_mb: address space of one call.
        file_mb: size of each file that the code writes.
        output_chars: characters of the output that the model reads; the middle is cut.
        processes: processes and threads that the code may start; no effect for root, see `sandbox_user`.
        interpreter: the Python that runs the code, without site packages.
    """

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
        user = sandbox_user(interpreter)
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
        folder, output = await to_thread.run_sync(self._prepare, code)
        try:
            ending = await self._run(folder, output)
            printed = await to_thread.run_sync(self._read_output, output)
        finally:
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(_remove, folder, output)
        text = "\n".join(filter(None, [printed.rstrip("\n"), ending])) or "(no output)"
        self.runs.append(SandboxRun(code, text))
        return text

    def _prepare(self, code: str) -> tuple[Path, BinaryIO]:
        """Make a folder with the program, and an unnamed file for its output, which the code cannot open."""
        try:
            folder = Path(tempfile.mkdtemp(prefix="penstock-python-"))
            program = folder / "main.py"
            program.write_bytes(code.encode("utf-8", "replace"))
            program.chmod(0o644)
            if "user" in self._limits:
                os.chown(folder, self._limits["user"], self._limits["user"])
            return folder, tempfile.TemporaryFile()
        except OSError as error:
            raise EnvironmentFailure(f"the sandbox has no folder to run in: {error}") from error

    async def _run(self, folder: Path, output: BinaryIO) -> str:
        """Run the program until it ends or its deadline passes; return a line on how it ended, empty for success."""
        limited = [self._interpreter, "-I", "-S", confine.__file__, json.dumps(self._limits)]
        program = [self._interpreter, "-I", "-S", "-u", "-X", "utf8", "main.py"]
        try:
            with anyio.CancelScope(shield=True):  # cancelled half-way, the process would leak
                process = await anyio.open_process(
                    [*limited, *program], stdin=None, stderr=output, cwd=folder, env={}, start_new_session=True
                )
        except OSError as error:
            raise EnvironmentFailure(f"the sandbox cannot start a process: {error}") from error
        try:
            await self._wait_started(process)
            with anyio.move_on_after(self._timeout_s):
                return _describe_exit(await process.wait())
            return f"TimeoutError: the code did not end within {self._timeout_s:g} s"
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # and the processes it started
            with anyio.CancelScope(shield=True), anyio.move_on_after(_EXIT_TIMEOUT_S):
                await process.aclose()

    async def _wait_started(self, process: Process) -> None:
        """Wait until the model's code starts.

        Raises:
            EnvironmentFailure: it does not start, which is not the model's fault.
        """
        assert process.stdout is not None  # noqa: S101  (a pipe)
        found = b""
        with anyio.move_on_after(_START_TIMEOUT_S):
            with suppress(anyio.EndOfStream):
                while True:
                    found += await process.stdout.receive()
            if found != b"begun":
                why = found.removeprefix(b"begun").decode(errors="replace") or "its process ended"
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


def _remove(folder: Path, output: BinaryIO) -> None:
    output.close()
    shutil.rmtree(folder, ignore_errors=True)


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
    needed = [interpreter, os.path.realpath(interpreter), confine.__file__]
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
