"""One process of a role: started tethered to us, its output in its log, stopped with all that it started."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import anyio
import structlog
from anyio.abc import ByteReceiveStream, Process
from anyio.streams.buffered import BufferedByteReceiveStream

from stream import parent_death as tether
from stream.errors import RunFailedError
from workers.run.role_specs import RoleSpec

log = structlog.get_logger()

_LONGEST_LINE = 64 * 1024
_FRAME, _CORNER = " \t|", "+-"
"""What Python draws round the exceptions of a group."""
_TAIL_BYTES = 64 * 1024
_LARGEST_LOG = 64 << 20
_KEPT_OF_LOG = 4 << 20


class ChildProcess:
    """A process that can be started again and again; one life at a time.

    Args:
        spec: its name and command line.
        log_folder: folder of its log.
    """

    def __init__(self, spec: RoleSpec, log_folder: Path) -> None:
        self.spec = spec
        self.log_file = log_folder / f"{spec.name}.log"
        self.exited = anyio.Event()
        """Set by whoever keeps it, once it will not be started again."""
        self.has_listened = False
        """It has said where it listens, in this life or an earlier one."""
        self._process: Process | None = None
        self._asked_to_stop = False
        self._log_start = 0

    async def run(self, on_listening: Callable[[str], None] | None = None) -> int:
        """Start the process, and wait for its end.

        Args:
            on_listening: called with the URL that the process says it listens on; None: it listens on nothing.

        Returns:
            Its exit code, negative for a signal.

        Raises:
            RunFailedError: it cannot be started, or did not say in time where it listens.
        """
        async with await anyio.open_file(self.log_file, "ab") as file:
            self._log_start = await file.tell()
            self._process = process = await self._start(file.wrapped.fileno(), on_listening is not None)
        try:
            if self._asked_to_stop:  # while it was being started
                self.terminate()
            if on_listening is not None:
                await self._copy_output(process, on_listening)
            return await process.wait()
        finally:
            self._kill_group(process)
            with anyio.CancelScope(shield=True):
                await process.aclose()

    def terminate(self) -> None:
        """Ask it to stop."""
        self._asked_to_stop = True
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()

    def kill(self) -> None:
        """Kill it, and whatever it has started."""
        self._asked_to_stop = True
        if self._process is not None and self._process.returncode is None:
            self._kill_group(self._process)

    def last_error(self) -> str:
        """The last error that it wrote, else its last line; reads the log."""
        with self.log_file.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, size - _TAIL_BYTES))
            said = file.read().decode(errors="replace").splitlines()
        lines = [line for line in (line.lstrip(_FRAME).rstrip() for line in said) if line and line[:2] != _CORNER]
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (errors or lines or ["it said nothing"])[-1]

    def trim_log(self) -> None:
        """Cut a log that has grown too large down to its end: whatever user code prints, it does not fill the disk.

        The process goes on writing to the same file, at whose end it writes whatever that is; so it never waits for
        anybody to read. A line that it writes while the log is cut may be lost.
        """
        try:
            size = self.log_file.stat().st_size
        except FileNotFoundError:  # not started yet
            return
        if size <= _LARGEST_LOG:
            return
        with self.log_file.open("r+b") as file:
            file.seek(size - _KEPT_OF_LOG)
            end = file.read().partition(b"\n")[2]
            file.truncate(0)
        self._log_start = 0
        with self.log_file.open("ab") as file:
            file.write(b"... (%d bytes before were cut off: a log has at most %d)\n" % (size - len(end), _LARGEST_LOG))
            file.write(end)

    async def _start(self, output: int, announces: bool) -> Process:
        # A session of its own: Ctrl-C in the terminal reaches us alone, and we say who stops when.
        try:
            return await anyio.open_process(
                (sys.executable, "-I", "-S", str(tether.__file__), *self.spec.command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if announces else output,
                stderr=output,
                env={**os.environ, **self.spec.environment},
                start_new_session=True,
            )
        except OSError as error:
            raise RunFailedError(f"{self.spec.name} cannot be started: {error}") from error

    async def _copy_output(self, process: Process, on_listening: Callable[[str], None]) -> None:
        """Find the announcement in the output, and copy all of it to the log."""
        stream = BufferedByteReceiveStream(cast("ByteReceiveStream", process.stdout))
        async with await anyio.open_file(self.log_file, "ab", buffering=0) as file:
            try:
                with anyio.fail_after(self.spec.listen_timeout_s):
                    url = None
                    while url is None:
                        line = await stream.receive_until(b"\n", _LONGEST_LINE)
                        await file.write(line + b"\n")
                        url = re.search(rb"listening on (\S+)", line)
                    self.has_listened = True
                    on_listening(url[1].decode())
                async for chunk in stream:
                    await file.write(chunk)
            except TimeoutError:
                late = f"{self.spec.name} did not say within {self.spec.listen_timeout_s:g} s where it listens"
                raise RunFailedError(f"{late} (its log is {self.log_file})") from None
            except anyio.DelimiterNotFound as error:
                raise RunFailedError(f"{self.spec.name} writes something else than where it listens") from error
            except (anyio.EndOfStream, anyio.IncompleteRead):
                return

    @staticmethod
    def _kill_group(process: Process) -> None:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # its session's first process leads its group
        except (ProcessLookupError, PermissionError):  # nobody is left in it (macOS says it the second way)
            return


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"
