"""The child processes of a run: start them, read their logs, stop them, and kill those that do not stop in time."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import anyio.to_thread
import structlog
from msgspec.structs import replace

from envs.call.call_memory import CallMemoryReader, RunningCall, make_call_memory
from stream import parent_death
from stream.causes import ErrorCause, cause_from_crash, cause_from_traceback, parse_cause
from stream.disk_space import persist
from stream.durable import append_all
from stream.errors import RunFailedError
from workers.launch.hang_watch import end_hanging, wait_until_hanging
from workers.launch.specs import ProcessSpec
from workers.role.memory_watch import WATCHED
from workers.role.watchdogs import CALL_MEMORY

log = structlog.get_logger()

_LISTENING = re.compile(rb"^listening on (\S+)\n", re.MULTILINE)
_POLL_S = 0.02
"""Seconds between two looks at a log, and at a process on systems without pidfds."""
_ABORT_S = 2.0
"""Seconds for a hanging process to print where it is, and to end, before SIGKILL."""
_CALLS_SHOWN = 2
_OWN_FOLDERS = tuple(f"{Path(__file__).resolve().parents[2] / name}/" for name in ("stream", "envs", "workers"))
"""Folders of Penstock's packages, whose frames are not the user's."""
_TRACEBACK_INDENT, _TRACEBACK_CORNERS = " \t|", "+-"
"""Characters that Python draws around the traceback of an exception group."""
_TAIL_BYTES = 64 * 1024
_MAX_LOG_BYTES = 64 << 20
_TRIMMED_LOG_BYTES = 4 << 20


def start_process(spec: ProcessSpec, output: int) -> subprocess.Popen[bytes]:
    """Start a process that leads its own process group and dies with this one.

    Call it on the main thread: the kernel's parent-death signal fires when the thread that started the child ends.

    Args:
        spec: command line and environment.
        output: descriptor for standard output and standard error.

    Raises:
        RunFailedError: the process cannot be started.
    """
    try:
        return subprocess.Popen(  # noqa: S603  (the command line is built by Penstock)
            (sys.executable, "-I", "-S", str(parent_death.__file__), str(os.getpid()), *spec.command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, WATCHED: "1", **spec.environment},
            start_new_session=True,  # Ctrl-C reaches only this process, which stops the roles in order
        )
    except OSError as error:
        raise RunFailedError(f"{spec.name} cannot be started: {error}") from error


async def _wait_exit(process: subprocess.Popen[bytes]) -> int:
    """Wait until a process exits. Returns its exit code, negative for a signal."""
    descriptor = os.pidfd_open(process.pid) if sys.platform == "linux" and process.returncode is None else None
    try:
        while process.poll() is None:
            await (anyio.sleep(_POLL_S) if descriptor is None else anyio.wait_readable(descriptor))
    finally:
        if descriptor is not None:
            os.close(descriptor)
    return process.returncode


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its descendants, even if it has exited itself."""
    with suppress(ProcessLookupError, PermissionError):  # the group is empty (macOS raises the second)
        os.killpg(process.pid, signal.SIGKILL)


class ChildProcess:
    """A process that can be restarted; at most one instance runs at a time.

    Args:
        spec: name and command line.
        log_folder: folder of the log file, `NAME.log`.
        hang_timeout_s: how long its event loop may stand still before it is killed; None: it is not watched.
    """

    def __init__(self, spec: ProcessSpec, log_folder: Path, hang_timeout_s: float | None = None) -> None:
        self.spec = spec
        self.log_file = log_folder / f"{spec.name}.log"
        self.exited = anyio.Event()
        """Set by the owner when the process has ended and is not restarted."""
        self.has_listened = False
        """Whether any instance of this process has announced a URL."""
        self.last_pid: int | None = None
        """Process id of the last instance."""
        self.was_hanging = False
        """The last instance was killed because its event loop stood still."""
        self._hang_timeout_s = hang_timeout_s
        self._last_calls: list[RunningCall] = []
        """Calls of user code that the last instance was in when it ended; of one that hung, what held it up."""
        self._memory: CallMemoryReader | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._stop_requested = False
        self._log_start = self._searched_size = 0

    async def run(self, on_listening: Callable[[str], None] | None = None) -> int:
        """Start the process and wait until it exits. Returns its exit code, negative for a signal.

        Args:
            on_listening: called with the URL that a server announces; None for a process that does not listen.

        Raises:
            RunFailedError: the process cannot be started, or did not announce its URL in time.
        """
        self.was_hanging, self._last_calls = False, []
        if self._hang_timeout_s is None:
            return await self._run(on_listening, None)
        with make_call_memory() as memory:
            self._memory = memory
            try:
                return await self._run(on_listening, memory)
            finally:
                self._memory = None
                if not self.was_hanging:
                    self._last_calls = memory.running_calls()

    async def _run(self, on_listening: Callable[[str], None] | None, memory: CallMemoryReader | None) -> int:
        spec = self.spec
        if memory is not None:
            spec = replace(spec, environment={**spec.environment, CALL_MEMORY: memory.path})
        with await anyio.to_thread.run_sync(self._open_log) as file:
            self._log_start = file.tell()
            self._process = process = start_process(spec, file.fileno())
            self.last_pid = process.pid
        try:
            if self._stop_requested:  # while the log was opened
                process.terminate()
            in_time = True
            async with anyio.create_task_group() as tasks:
                if on_listening is not None:

                    async def limit_start() -> None:
                        nonlocal in_time
                        in_time = await self._wait_listening(on_listening)
                        if not in_time:
                            _kill_group(process)

                    tasks.start_soon(limit_start)
                if memory is not None:
                    tasks.start_soon(self._end_if_hanging, process, memory)
                code = await _wait_exit(process)
                tasks.cancel_scope.cancel()
        finally:
            _kill_group(process)
            with anyio.CancelScope(shield=True):
                await _wait_exit(process)
        if not in_time:
            raise RunFailedError(
                f"{self.spec.name} did not announce its URL within {self.spec.listen_timeout_s:g} s (its log is "
                f"{self.log_file})"
            )
        return code

    async def _end_if_hanging(self, process: subprocess.Popen[bytes], memory: CallMemoryReader) -> None:
        """Kill the process when its event loop has stood still for too long."""
        await wait_until_hanging(memory, self._hang_timeout_s or 0.0)
        self.was_hanging = True
        call = await anyio.to_thread.run_sync(end_hanging, memory)
        self._last_calls = [call] if call else []
        await anyio.sleep(_ABORT_S)
        _kill_group(process)

    @property
    def hanging_call(self) -> str:
        """The call of user code that held up the last instance, if it was killed for that."""
        return self._last_calls[0].text if self.was_hanging and self._last_calls else "unknown"

    def running_calls(self) -> list[RunningCall]:
        """Return the calls of user code that the process is in, the newest first; none if it is not watched."""
        return self._memory.running_calls() if self._memory is not None else []

    def describe_end(self, code: int) -> str:
        """Describe how the last instance ended, and which calls of user code it was in."""
        how = describe_exit(code)
        if self.was_hanging:
            how = f"was killed because its event loop had not turned for {self._hang_timeout_s:g} s"
        if not self._last_calls:
            return how
        named = ", ".join(call.text for call in self._last_calls[:_CALLS_SHOWN])
        more = len(self._last_calls) - _CALLS_SHOWN
        return f"{how} in {named}{f' and {more} more calls' if more > 0 else ''}"

    def terminate(self) -> None:
        """Send SIGTERM to the process."""
        self._stop_requested = True
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """Kill the process and its descendants."""
        self._stop_requested = True
        if self._process is not None and self._process.returncode is None:
            _kill_group(self._process)

    def last_error(self) -> str:
        """Return the last line of the log that begins with `error: `, else its last line. Blocks on file I/O."""
        tail = [line.lstrip(_TRACEBACK_INDENT).rstrip() for line in self._log_tail().splitlines()]
        lines = [line for line in tail if line and line[:2] != _TRACEBACK_CORNERS]
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (errors or lines or ["its log is empty"])[-1]

    def last_cause(self) -> ErrorCause | None:
        """Return the exception that ended the process, if its log shows it. Blocks on file I/O."""
        tail = self._log_tail()
        last = tail[tail.rfind("\nerror: ") + 1 :] if "error: " in tail else tail
        crash = cause_from_crash(tail, self.spec.name, _OWN_FOLDERS)
        if crash is not None and self.was_hanging:
            return replace(crash, exception=f"the event loop had not turned for {self._hang_timeout_s:g} s")
        return parse_cause(last) or crash or cause_from_traceback(tail, self.spec.name, _OWN_FOLDERS)

    def blocking_code(self, within_s: float) -> ErrorCause | None:
        """Return the code that blocked the event loop in the last seconds, if the log says so. Blocks on file I/O."""
        earliest = datetime.now(UTC) - timedelta(seconds=within_s)
        for line in reversed(self._log_tail().splitlines() if self.log_file.exists() else []):
            if '"event_loop.blocked"' not in line:
                continue
            with suppress(ValueError, KeyError):
                event = json.loads(line)
                if datetime.fromisoformat(event["timestamp"]) < earliest:
                    return None
                place, _, name = event["by"].rpartition(" ")
                file, _, number = place.rpartition(":")
                return ErrorCause(
                    exception=f"{name} blocks the event loop of {self.spec.name}; await, or write def, not async def",
                    file=file,
                    line=int(number),
                )
        return None

    def new_blocking_code(self, within_s: float) -> ErrorCause | None:
        """Return what `blocking_code` finds if the log has changed since the last call. Blocks on file I/O."""
        if not self.log_file.exists():  # not started yet
            return None
        size = self.log_file.stat().st_size
        searched_size, self._searched_size = self._searched_size, size
        return self.blocking_code(within_s) if size != searched_size else None

    def _log_tail(self) -> str:
        with self.log_file.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, size - _TAIL_BYTES))
            return file.read().decode(errors="replace")

    def _open_log(self) -> io.FileIO:
        """Open the log; on a full disk a new one waits for room.

        Raises:
            RunFailedError: it cannot be opened.
        """
        try:
            return persist(self.log_file, lambda: self.log_file.open("ab", buffering=0))
        except OSError as error:
            raise RunFailedError(f"{self.log_file} cannot be opened: {error.strerror}") from error

    def trim_log(self) -> None:
        """Remove the beginning of a log above `_MAX_LOG_BYTES`, so that user code that prints cannot fill the disk.

        The process keeps appending to the same open file. A line that it writes during the cut may be lost.
        """
        if not self.log_file.exists() or (size := self.log_file.stat().st_size) <= _MAX_LOG_BYTES:
            return
        with self.log_file.open("r+b") as file:
            file.seek(size - _TRIMMED_LOG_BYTES)
            end = file.read().partition(b"\n")[2]
            file.truncate(0)
        self._log_start = 0
        note = b"... (%d bytes were removed here: a log has at most %d)\n" % (size - len(end), _MAX_LOG_BYTES)
        with suppress(OSError), self.log_file.open("ab", buffering=0) as log:  # others may have filled the disk
            append_all(log, note, end)

    async def _wait_listening(self, on_listening: Callable[[str], None]) -> bool:
        """Wait for the line in the log that announces the server's URL. Returns False after the timeout."""
        position, rest = self._log_start, b""
        with anyio.move_on_after(self.spec.listen_timeout_s):
            while True:
                async with await anyio.open_file(self.log_file, "rb") as file:
                    await file.seek(position)
                    text = await file.read()
                position += len(text)
                if found := _LISTENING.search(rest + text):
                    self.has_listened = True
                    on_listening(found[1].decode())
                    return True
                rest = (rest + text).rpartition(b"\n")[2]
                await anyio.sleep(_POLL_S)
        return False


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

    def count_running(self, role: str) -> int:
        """Return how many processes of a role run or restart. Callable from any thread."""
        return sum(child.spec.role == role and not child.exited.is_set() for child in list(self._all))

    def process_ids(self) -> dict[str, int]:
        """Return the ids of the running processes and of this one, by name."""
        running = {child.spec.name: child.last_pid for child in self._all if not child.exited.is_set()}
        return {"supervisor": os.getpid()} | {name: pid for name, pid in running.items() if pid is not None}

    async def trim_logs(self) -> None:
        """Trim every log that is too large."""
        for child in self._all:
            await anyio.to_thread.run_sync(child.trim_log)

    def running_calls(self) -> list[tuple[str, RunningCall]]:
        """Return the calls of user code that processes are in, each with the name of its process."""
        return [(child.spec.name, call) for child in self._all for call in child.running_calls()]

    async def blocking_code(self, within_s: float) -> ErrorCause | None:
        """Return the code that last blocked the event loop of a process, if its log says so for the last seconds."""
        causes = [await anyio.to_thread.run_sync(child.blocking_code, within_s) for child in self._all]
        return next(filter(None, causes), None)

    async def new_blocking_codes(self, within_s: float) -> list[ErrorCause]:
        """Return the code that blocks the event loop of each process whose log has changed since the last call."""

        def read_logs() -> list[ErrorCause]:
            return list(filter(None, [child.new_blocking_code(within_s) for child in list(self._all)]))

        return await anyio.to_thread.run_sync(read_logs)

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


def describe_exit(code: int) -> str:
    """Describe an exit code in words."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
