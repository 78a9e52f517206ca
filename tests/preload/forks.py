"""Forks the roles of a supervisor that was itself forked from a process with all modules::

    supervisor ── request ──► fork server              one thread, no event loop
        ▲                        └─ intermediate        forks the role, then exits
        └──── parent of ──────────── role

When the intermediate exits, the kernel reparents the role to the nearest ancestor that is marked as a child subreaper
(`prctl(2)`): the supervisor, which marks itself for the duration of a request. The role is then an ordinary child of
the supervisor: with its process id in the names of leases, and with signals and exit codes of its own. Linux only.
"""

import contextlib
import ctypes
import json
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from stream.parent_death import die_with_parent
from tests.preload.client import can_be_forked
from tests.preload.program import run_to_end
from workers.launch import children
from workers.launch.specs import ProcessSpec

_PR_SET_CHILD_SUBREAPER = 36
_NUMBER = struct.Struct(">I")
_start_new = children.start_process


class Forked(subprocess.Popen[bytes]):
    """A child process that was forked, as if it had been opened here."""

    def __init__(self, pid: int, command: Sequence[str]) -> None:
        self.pid, self.args, self.returncode = pid, command, None
        self.stdin = self.stdout = self.stderr = None
        self._child_created, self._waitpid_lock = True, threading.Lock()


def fork_roles() -> None:
    """Fork a server for this process, which starts every role from now on.

    Call it before the process has threads or an event loop.
    """
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    if not os.fork():
        ours.close()
        null = os.open(os.devnull, os.O_RDWR)
        for target in (0, 1, 2):  # a reader of this process's output must not wait for the server to exit
            os.dup2(null, target)
        _serve(theirs, parent)
    theirs.close()

    def start_process(spec: ProcessSpec, output: int) -> subprocess.Popen[bytes]:
        if spec.command[0] != sys.executable or not can_be_forked(list(spec.command[1:]), code=True):
            return _start_new(spec, output)
        environment = {**os.environ, **spec.environment}
        request = json.dumps([spec.command, environment, str(Path.cwd()), os.getpid()]).encode()
        with _adopting_orphans():
            socket.send_fds(ours, [_NUMBER.pack(len(request))], [output])
            ours.sendall(request)
            return Forked(_receive_number(ours), spec.command)

    children.start_process = start_process


def _serve(connection: socket.socket, parent: int) -> NoReturn:
    """Answer requests until the connection closes, then exit the process."""
    die_with_parent(parent)
    while True:
        try:
            header, (output, *_), *_ = socket.recv_fds(connection, _NUMBER.size, 1)
            request = connection.recv(_NUMBER.unpack(header)[0], socket.MSG_WAITALL)
            connection.sendall(_NUMBER.pack(_fork(json.loads(request), connection, output)))
        except (OSError, ValueError, struct.error):  # the supervisor has exited
            os._exit(0)
        os.close(output)


def _fork(request: Any, connection: socket.socket, output: int) -> int:
    """Fork the role through an intermediate process. Returns the role's process id."""
    reading, writing = os.pipe()
    if intermediate := os.fork():
        os.close(writing)
        answer = os.read(reading, _NUMBER.size)
        os.close(reading)
        os.waitpid(intermediate, 0)
        return int(_NUMBER.unpack(answer)[0])
    intermediate = os.getpid()
    if pid := os.fork():
        os.write(writing, _NUMBER.pack(pid))
        os._exit(0)
    try:
        for descriptor in (connection.fileno(), reading, writing):
            os.close(descriptor)
        while os.getppid() == intermediate:  # until the kernel reparents this process
            time.sleep(0.0005)
        command, environment, folder, parent = request
        die_with_parent(parent)
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        _set_command_line(command)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        random.seed()
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()
        run_to_end(command[1:])
    finally:
        os._exit(1)


def _set_command_line(command: Sequence[str]) -> None:
    """Make `ps` show this command, cut to the length of the command line that started this process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, see proc(5)
    text = b"\0".join(map(os.fsencode, command))[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _receive_number(connection: socket.socket) -> int:
    received = connection.recv(_NUMBER.size, socket.MSG_WAITALL)
    if len(received) < _NUMBER.size:
        raise ConnectionResetError("the fork server of this supervisor is gone")
    return int(_NUMBER.unpack(received)[0])


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Mark this process as a child subreaper while the context is open, so that it adopts orphaned descendants."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
