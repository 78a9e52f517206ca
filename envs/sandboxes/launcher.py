"""Process 1 of a sandbox of the provider `process`: runs commands, reads and writes files, ends at a time.

`envs.sandboxes.process` starts it by its text, in bubblewrap, with the standard library of any Python from 3.9 on. The
worker passes it one socket for each request: a frame of JSON, answered by a frame of JSON and bytes. It ends when the
worker's end of the control socket is closed, and all processes with it.

It is process 1 of its namespace, so no signal from inside reaches it, and it cannot be traced or read through `/proc`.
It waits for nothing that a process of the policy could withhold.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from envs.sandboxes import launcher_files

_PR_SET_DUMPABLE = 4
_WATCH_S = 0.25
"""Between two looks at the memory and the number of files."""
_KILL_S = 3.0
"""Time to kill a session that goes on forking; then everything is killed."""
_PIPE_BYTES = 1 << 16
_SPARE_PROCESSES = 16
"""More than the policy's limit, so that a command starts in spite of a fork bomb."""
_LENGTH = struct.Struct("<I")
MAX_LIFE_CODE = 3
"""Exit code after `max_life_s`."""


class Output:
    """What a command writes to one stream; of more than `most` bytes the beginning and the end."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.total = 0
        self._is_taken = False
        self._head, self._tail = bytearray(), bytearray()

    def add(self, data: bytes) -> None:
        """Keep what there is room for; nothing after `take`."""
        if self._is_taken:
            return
        room = max(0, self.most // 2 - len(self._head))
        self.total += len(data)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self.most:
            self._tail = self._tail[len(self._tail) - self.most :]

    def take(self) -> bytes:
        """Return the output, with a line about what is left out."""
        head, tail = bytes(self._head), bytes(self._tail)
        self._is_taken, self._head, self._tail = True, bytearray(), bytearray()
        if self.total <= self.most:
            return head + tail
        end = tail[len(tail) - (self.most - self.most // 2) :]
        return head + b"\n... %d bytes in all ...\n" % self.total + end


class Command:
    """A command that runs, or whose output is still open."""

    def __init__(self, request: dict[str, Any], connection: socket.socket) -> None:
        self.connection = connection
        self.begun = time.monotonic()
        self.deadline = self.begun + request["timeout_s"]
        self.outputs = Output(request["max_bytes"]), Output(request["max_bytes"])
        self.pipes: list[int] = []
        self.pid = 0
        self.timed_out = False


class Launcher:
    """Serves requests until the control socket is closed or `max_life_s` has passed.

    Args:
        order: `socket`, `folders` (writable ones), `limits` by name of `resource`, `pids`, `memory_bytes`, `max_files`,
            `max_life_s`, `variables`, `max_bytes` (of files in a snapshot).
    """

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order
        self._end = time.monotonic() + order["max_life_s"]
        self._control = socket.socket(fileno=order["socket"])
        self._control.set_inheritable(False)
        self._control.setblocking(False)
        self._poll = select.poll()
        self._on_event: dict[int, Callable[[], object]] = {}
        self._commands: dict[int, Command] = {}
        self._base: dict[str, tuple[int, ...]] = {}
        self._looked = 0.0
        self._has_processes = False
        self._wake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a signal without a handler does not reach process 1
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._watch(self._wake, lambda: len(os.read(self._wake, _PIPE_BYTES)))
        self._watch(self._control.fileno(), self._accept)

    def serve(self) -> None:
        """Answer requests; returns when the sandbox is to end."""
        while time.monotonic() < self._end:
            for descriptor, _ in self._poll.poll(max(0.0, self._next_time() - time.monotonic()) * 1000):
                with suppress(BlockingIOError):
                    self._on_event.get(descriptor, int)()
            self._has_processes = self._reap()
            for command in [one for one in self._commands.values() if time.monotonic() >= one.deadline]:
                if not command.timed_out:
                    command.timed_out = True
                    _kill_session(command.pid)
                else:
                    _kill(-1, signal.SIGKILL)
                command.deadline = time.monotonic() + _KILL_S
            if self._has_processes and time.monotonic() - self._looked >= _WATCH_S:
                self._enforce()
                self._looked = time.monotonic()

    def _next_time(self) -> float:
        times: list[float] = [self._end, *(command.deadline for command in self._commands.values())]
        if self._has_processes:
            times.append(self._looked + _WATCH_S)
        return min(times)

    def _watch(self, descriptor: int, act: Callable[[], object], event: int = select.POLLIN) -> None:
        self._poll.register(descriptor, event)
        self._on_event[descriptor] = act

    def _forget(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        del self._on_event[descriptor]

    def _accept(self) -> None:
        """Take a request's socket, with a file if the request has one."""
        size = socket.CMSG_SPACE(2 * 4)
        data, ancillary, _, _ = self._control.recvmsg(1, size, socket.MSG_CMSG_CLOEXEC)
        if not data:
            os._exit(0)
        if not ancillary:
            return
        content = ancillary[0][2]
        descriptors = struct.unpack(f"{len(content) // 4}i", content)
        connection = socket.socket(fileno=descriptors[0])
        connection.setblocking(False)
        received = bytearray()

        def receive() -> None:
            try:
                chunk = connection.recv(_PIPE_BYTES)
            except ConnectionError:
                chunk = b""
            received.extend(chunk)
            is_whole = (
                len(received) >= _LENGTH.size and len(received) >= _LENGTH.size + _LENGTH.unpack_from(received)[0]
            )
            if is_whole or not chunk:
                self._forget(connection.fileno())
                if is_whole:
                    self._act(json.loads(received[_LENGTH.size :]), connection, descriptors[1:])
                else:
                    connection.close()

        self._watch(connection.fileno(), receive)

    def _act(self, request: dict[str, Any], connection: socket.socket, files: tuple[int, ...]) -> None:
        try:
            if request["do"] == "exec":
                self._start(request, connection)
                return
            answer, content = getattr(self, "do_" + request["do"])(request, *files)
            self._answer(connection, answer, content)
        except FileNotFoundError as error:
            self._answer(connection, {"error": str(error), "kind": "missing"})
        except (OSError, ValueError) as error:
            self._answer(connection, {"error": str(error), "kind": "refused"})
        except Exception as error:  # noqa: BLE001  (the sandbox goes on)
            self._answer(connection, {"error": f"{type(error).__name__}: {error}", "kind": "failed"})
        finally:
            for descriptor in files:
                os.close(descriptor)

    def _answer(self, connection: socket.socket, answer: dict[str, Any], content: bytes = b"") -> None:
        """Send an answer, as fast as the worker reads it."""
        head = json.dumps({**answer, "size": len(content)}).encode()
        left = memoryview(_LENGTH.pack(len(head)) + head + content)

        def send() -> None:
            nonlocal left
            try:
                left = left[connection.send(left) :]
            except BlockingIOError:
                return
            except OSError:  # nobody waits for it
                left = left[:0]
            if not left:
                self._forget(connection.fileno())
                connection.close()

        self._watch(connection.fileno(), send, select.POLLOUT)
        send()

    def _start(self, request: dict[str, Any], connection: socket.socket) -> None:
        """Start a command in a session of its own."""
        command = Command(request, connection)
        pipes = [os.pipe2(os.O_CLOEXEC) for _ in command.outputs]
        command.pid = os.fork()
        if command.pid == 0:
            self._execute(request, [write for _, write in pipes])
        self._commands[command.pid] = command
        self._watch(connection.fileno(), lambda: self._withdraw(command), 0)
        for (pipe, write), output in zip(pipes, command.outputs):  # noqa: B905  (Python 3.9)
            os.close(write)
            os.set_blocking(pipe, False)
            command.pipes.append(pipe)
            self._watch(pipe, self._reader(pipe, output))

    def _withdraw(self, command: Command) -> None:
        """Kill a command whose result nobody waits for any more."""
        self._forget(command.connection.fileno())
        command.deadline = time.monotonic()

    def _reader(self, pipe: int, output: Output) -> Callable[[], None]:
        def read() -> None:
            if data := os.read(pipe, _PIPE_BYTES):
                output.add(data)
            else:
                self._forget(pipe)
                os.close(pipe)

        return read

    def _execute(self, request: dict[str, Any], outputs: list[int]) -> None:
        """In the child: become the command. Never returns."""
        code = 126
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            os.dup2(outputs[0], 1)
            os.dup2(outputs[1], 2)
            os.nice(5)
            limits = {**self._order["limits"], "RLIMIT_NPROC": self._order["pids"]}
            _set_limits(limits)
            try:
                os.chdir(request["cwd"])
                os.execvpe(request["command"][0], request["command"], self._order["variables"] | request["env"])  # noqa: S606
            except FileNotFoundError as error:
                code = 127
                os.write(2, f"{error.filename}: {error.strerror}\n".encode())
        except BaseException as error:  # noqa: BLE001  (the command's own failure)
            os.write(2, f"{request['command'][0]}: {error}\n".encode())
        finally:
            os._exit(code)

    def _reap(self) -> bool:
        """Answer for commands that have ended; returns whether any process is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid in self._commands:
                self._finish(self._commands.pop(pid), status)

    def _finish(self, command: Command, status: int) -> None:
        for pipe in command.pipes:
            for _ in range(32):  # what is in the pipe; a process that it left may go on writing
                with suppress(BlockingIOError):
                    self._on_event.get(pipe, int)()
        code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        if command.timed_out:
            _kill_session(command.pid)
        out, err = (output.take() for output in command.outputs)
        answer = {
            "code": 137 if command.timed_out else code,
            "ended": "timeout" if command.timed_out else "exited",
            "truncated": any(output.total > output.most for output in command.outputs),
            "seconds": time.monotonic() - command.begun,
            "sizes": [len(out), len(err)],
        }
        self._answer(command.connection, answer, out + err)

    def _enforce(self) -> None:
        """Kill the largest process if all of them need too much memory, and all of them if there are too many files."""
        most = self._order["memory_bytes"]
        sizes = {pid: _resident_bytes(pid) for pid in _processes()}
        if sum(sizes.values()) > most:
            exact = {pid: _proportional_bytes(pid) for pid in sizes}
            if sum(exact.values()) > most:
                _kill(max(exact, key=lambda pid: exact[pid]), signal.SIGKILL)
        used = sum(status.f_files - status.f_ffree for status in map(os.statvfs, self._order["folders"]))
        if used > self._order["max_files"]:
            _kill(-1, signal.SIGKILL)

    def do_begin(self, request: dict[str, Any], *snapshot: int) -> tuple[dict[str, Any], bytes]:
        """Restore a snapshot, if there is one, and remember which files there are."""
        for source in snapshot:
            launcher_files.restore(source)
        os.makedirs(request["workdir"], exist_ok=True)  # noqa: PTH103
        self._base = launcher_files.manifest(self._order["folders"])
        return {}, b""

    def do_read(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Read a regular file."""
        return {}, launcher_files.read_file(request["path"], request["max_bytes"])

    def do_write(self, request: dict[str, Any], source: int) -> tuple[dict[str, Any], bytes]:
        """Write files whose contents the worker's file has."""
        launcher_files.write_files(request["files"], source)
        return {}, b""

    def do_changed(self, _: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """List files that differ from those at the beginning."""
        now = launcher_files.manifest(self._order["folders"])
        return {}, json.dumps(launcher_files.changes(self._base, now)).encode()

    def do_snapshot(self, _: dict[str, Any], target: int) -> tuple[dict[str, Any], bytes]:
        """Write the files to a file of the worker; all other processes are stopped meanwhile."""
        _kill(-1, signal.SIGSTOP)
        try:
            launcher_files.save(self._order["folders"], target, self._order["max_bytes"])
        finally:
            _kill(-1, signal.SIGCONT)
        return {}, b""


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]  # noqa: PTH208


def _session(pid: int) -> int:
    """Return the session of a process that has not ended; 0 if it has."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in b"ZX" else int(fields[3])


def _kill_session(session: int) -> None:
    """Kill all processes of a session, also those that start meanwhile; all processes if that does not end."""
    end = time.monotonic() + _KILL_S
    while members := [pid for pid in _processes() if _session(pid) == session]:
        for pid in members if time.monotonic() < end else [-1]:
            _kill(pid, signal.SIGKILL)


def _kill(pid: int, number: int) -> None:
    with suppress(OSError):
        os.kill(pid, number)


def _resident_bytes(pid: int) -> int:
    with suppress(OSError, IndexError), open(f"/proc/{pid}/statm", "rb") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * resource.getpagesize()
    return 0


def _proportional_bytes(pid: int) -> int:
    """Return a process's share of memory, in which what processes share is divided among them."""
    with suppress(OSError, IndexError), open(f"/proc/{pid}/smaps_rollup", "rb") as file:  # noqa: PTH123
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith(b"Pss:"))
    return 0


def _set_limits(limits: dict[str, int]) -> None:
    for name, value in limits.items():
        kind = getattr(resource, name)
        most = resource.getrlimit(kind)[1]
        limit = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(kind, (limit, limit))


def main() -> None:
    """Serve, and end the sandbox at the end of its life."""
    order = json.loads(sys.argv[1])
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    _set_limits({**order["limits"], "RLIMIT_NPROC": order["pids"] + _SPARE_PROCESSES})
    os.umask(0o022)
    Launcher(order).serve()
    os._exit(MAX_LIFE_CODE)


if __name__ == "__main__":
    main()
