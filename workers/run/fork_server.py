"""Start Python programs by forking a process that has already imported their modules.

A trainer or a local engine spends seconds importing torch and transformers. A fork of a process that has imported them
starts in milliseconds and shares their memory. Linux only::

    supervisor ── request ──► fork server              one thread, no event loop, no CUDA
        ▲                        └─ intermediate        forks the program, then exits
        └──── parent of ──────────── program

When the intermediate exits, the kernel reparents the program to the nearest ancestor that is marked as a child
subreaper (`prctl(2)`): the supervisor, which marks itself for the duration of a request. The program is then an
ordinary child of the supervisor: the supervisor waits for it and signals it, and it dies with the supervisor.
"""

import contextlib
import ctypes
import gc
import importlib
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec
from msgspec import Struct

from stream.parent_death import die_with_parent
from workers.run.program import Program

_PR_SET_CHILD_SUBREAPER = 36
_LENGTH = struct.Struct(">I")
_READY = b"\0"
_DESCRIPTORS = 2
"""Descriptors sent with each request: standard output and standard error."""
_subreaper_lock = threading.Lock()
_inherited: "ForkServer | None" = None
"""This process's fork server, set by `nest` before the program runs; None if there is none."""


class _Preload(Struct, frozen=True, tag=True):
    modules: tuple[str, ...]
    """Imported while no request waits."""


class _Request(Struct, frozen=True, tag=True):
    program: Program
    parent: int
    """Process id of the caller."""
    environment: dict[str, str]
    folder: str
    modules: tuple[str, ...]
    """Imported before the fork."""
    new_session: bool
    nested: bool
    """Give the program its own fork server."""


class ForkServer:
    """The caller's side of a fork server. Thread-safe."""

    def __init__(self, connection: socket.socket, process: subprocess.Popen[bytes] | None) -> None:
        self._connection = connection
        self._process = process
        self._lock = threading.Lock()

    @classmethod
    def start(cls, preload: Sequence[str] = ()) -> "ForkServer":
        """Start a server, or return the inherited one if there is one.

        Args:
            preload: modules to import while no request waits; modules that fail to import are skipped.
        """
        if _inherited is not None:
            return _inherited
        ours, theirs = socket.socketpair()
        call = f"serve({theirs.fileno()}, {os.getpid()}, {list(preload)!r})"
        room = "#" * 2000  # reserves argv space for the command lines of forked programs
        code = f"from workers.run.fork_server import serve; {call}  {room}"
        with theirs:
            process = subprocess.Popen(  # noqa: S603  (the current interpreter)
                (sys.executable, "-P", "-c", code),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C in the terminal reaches the supervisor alone
            )
        return cls(ours, process)

    @classmethod
    def inherited(cls) -> "ForkServer | None":
        """Return the server that `nest` gave this process when it was forked; None if there is none."""
        return _inherited

    def spawn(
        self,
        program: Program,
        *,
        environment: Mapping[str, str],
        folder: Path,
        output: tuple[int, int],
        modules: Sequence[str] = (),
        new_session: bool = True,
        nested: bool = False,
    ) -> int:
        """Start a program as a child of this process. Returns its process id.

        Args:
            program: the program to run.
            environment: environment variables. Variables that a preloaded library reads at import have no effect.
            folder: working directory.
            output: descriptors for standard output and standard error; standard input is /dev/null.
            modules: modules to import before the fork.
            new_session: make the program the leader of a new session and process group.
            nested: give the program its own fork server, with all modules of this one.

        Raises:
            OSError: the server has exited.
        """
        request = _Request(program, os.getpid(), dict(environment), str(folder), tuple(modules), new_session, nested)
        body = msgspec.msgpack.encode(request)
        with self._lock:
            socket.send_fds(self._connection, [_LENGTH.pack(len(body))], output)
            self._connection.sendall(body)
            _receive(self._connection, len(_READY))  # the server has imported the modules
            with _adopting_orphans():
                self._connection.sendall(_READY)
                return int(_LENGTH.unpack(_receive(self._connection, _LENGTH.size))[0])

    def preload(self, modules: Sequence[str]) -> None:
        """Let the server import more modules while no request waits. Modules that fail to import are skipped."""
        body = msgspec.msgpack.encode(_Preload(tuple(modules)))
        with self._lock, contextlib.suppress(OSError):  # a server that has exited is noticed when it is needed
            self._connection.sendall(_LENGTH.pack(len(body)) + body)

    def close(self) -> None:
        """End the server; programs that it started keep running."""
        self._connection.close()
        if self._process is not None:
            self._process.kill()  # it may still be importing and not read the connection
            self._process.wait()


def serve(connection: socket.socket | int, parent: int, preload: Sequence[str] = ()) -> NoReturn:
    """Answer requests until the connection closes, then exit the process.

    Args:
        connection: socket to the caller; a descriptor if this is a new interpreter.
        parent: process id of the caller.
        preload: modules to import while no request waits.
    """
    die_with_parent(parent)
    connection = socket.socket(fileno=connection) if isinstance(connection, int) else connection
    waiting = list(preload)
    while True:
        while waiting and not select.select([connection], [], [], 0)[0]:
            _import(waiting.pop(0))
        try:
            header, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, _DESCRIPTORS)
            body = _receive(connection, _LENGTH.unpack(header)[0])
            request = msgspec.msgpack.decode(body, type=_Request | _Preload)
            if isinstance(request, _Preload):
                waiting += request.modules
                continue
            for name in request.modules:
                _import(name)
            gc.freeze()  # a collection in a forked program would write to, and thereby copy, the shared pages
            connection.sendall(_READY)
            _receive(connection, len(_READY))
            connection.sendall(_LENGTH.pack(_fork(request, connection, descriptors)))
        except (OSError, struct.error):  # the caller has exited
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def _import(name: str) -> None:
    gc.disable()  # importing torch makes a million objects that stay; traversing them takes a fifth of the time
    with contextlib.suppress(Exception):  # the program that imports the module reports the error
        importlib.import_module(name)
    gc.enable()


def _fork(request: _Request, connection: socket.socket, descriptors: list[int]) -> int:
    """Fork the program through an intermediate process. Returns the program's process id."""
    reading, writing = os.pipe()
    if intermediate := os.fork():
        os.close(writing)
        answer = os.read(reading, _LENGTH.size)
        os.close(reading)
        os.waitpid(intermediate, 0)
        return int(_LENGTH.unpack(answer)[0])
    intermediate = os.getpid()
    if pid := os.fork():
        os.write(writing, _LENGTH.pack(pid))
        os._exit(0)
    try:
        connection.close()
        os.close(reading)
        os.close(writing)
        while os.getppid() == intermediate:  # until the kernel reparents this process
            time.sleep(0.0005)
        die_with_parent(request.parent)
        _become(request, descriptors)
    finally:
        os._exit(1)


def _become(request: _Request, descriptors: list[int]) -> NoReturn:
    """Turn this fork into the requested program."""
    if request.new_session:
        os.setsid()
    if request.nested:
        nest()
    for descriptor, target in zip(descriptors, (1, 2), strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(  # type: ignore[union-attr]
            line_buffering=stream is sys.stderr or stream.isatty(),
            write_through="PYTHONUNBUFFERED" in request.environment,
        )
    _set_command_line(request.program.command)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    if "numpy" in sys.modules:  # numpy's global generator is the only one that a fork does not reseed
        sys.modules["numpy"].random.seed()
    os._exit(request.program.run())


def _set_command_line(command: Sequence[str]) -> None:
    """Make `ps` show this command, cut to the length of the command line that started the fork server."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, see proc(5)
    text = b"\0".join(map(os.fsencode, command))[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def nest() -> None:
    """Fork a server for this process; call before it has threads or an event loop."""
    global _inherited  # noqa: PLW0603
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    if os.fork():
        theirs.close()
        _inherited = ForkServer(ours, None)
        return
    ours.close()
    null = os.open(os.devnull, os.O_RDWR)
    for target in (0, 1, 2):  # a reader of this process's output must not wait for the server to exit
        os.dup2(null, target)
    serve(theirs, parent)


def _receive(connection: socket.socket, count: int) -> bytes:
    """Receive exactly `count` bytes.

    Raises:
        ConnectionResetError: the peer closed the connection.
    """
    received = connection.recv(count, socket.MSG_WAITALL)
    if len(received) < count:
        raise ConnectionResetError("the other side of a fork server's connection is gone")
    return received


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Mark this process as a child subreaper while the context is open, so that it adopts orphaned descendants."""
    libc = ctypes.CDLL(None, use_errno=True)
    with _subreaper_lock:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            yield
        finally:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
