"""The worker's side of an agent's sandbox: passes its connections on to the endpoint, and keeps the end of its output.

`inside.py` is the other side of the Unix socket.
"""

import os
import shutil
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import anyio
from anyio.abc import ByteStream, Process, SocketListener, SocketStream

_OUTPUT_BYTES: Final = 64 << 10
"""The last part of what a program writes is kept."""
_BACKLOG: Final = 64
_MAX_CONNECTIONS: Final = 64
"""Of one sandbox, at once."""
_CONNECT: Final = b"CONNECT "


class OutputTail:
    """The last part of what a process writes."""

    def __init__(self) -> None:
        self.data = b""

    async def read(self, process: Process) -> None:
        """Read until the process has closed its output."""
        if process.stdout is not None:
            async for part in process.stdout:
                self.data = (self.data + part)[-_OUTPUT_BYTES:]


def remove_folder(path: str) -> None:
    """Remove a folder with all that is in it, also where a program has taken away the rights to do so."""
    shutil.rmtree(path, ignore_errors=True)
    for place, folders, _ in os.walk(path):
        for folder in (Path(place, name) for name in folders):
            if not folder.is_symlink():
                with suppress(OSError):
                    folder.chmod(0o700)
    shutil.rmtree(path, ignore_errors=True)


def bind_for_all(path: str) -> socket.socket:
    """Return a Unix socket at which every user may connect."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    bound.bind(path)
    Path(path).chmod(0o666)
    bound.listen(_BACKLOG)
    return bound


async def serve_connections(listener: SocketListener, serve: Callable[[SocketStream], Awaitable[None]]) -> None:
    """Serve the connections of one sandbox until cancelled; more than a number at once wait to be accepted.

    Each takes descriptors of this process, and a program may open as many as it likes.
    """
    room = anyio.Semaphore(_MAX_CONNECTIONS)

    async def serve_one(client: SocketStream) -> None:
        try:
            await serve(client)
        finally:
            room.release()

    async with anyio.create_task_group() as tasks:
        while True:
            await room.acquire()
            tasks.start_soon(serve_one, await listener.accept())


async def pass_on(client: SocketStream, host: str, port: int, elsewhere: list[str]) -> None:
    """Pass a connection on, in both directions, until both sides have ended.

    Args:
        client: the connection of the sandbox's side.
        host: of the endpoint.
        port: of the endpoint.
        elsewhere: gets the place of a connection that is to be passed on to another one, as a proxy would; the endpoint
            refuses it.
    """

    async def pump(source: ByteStream, target: ByteStream) -> None:
        try:
            async for data in source:
                if source is client and data.startswith(_CONNECT):
                    elsewhere.append(data.split()[1].decode("ascii", "replace"))
                await target.send(data)
            await target.send_eof()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):  # one side has closed the connection
            tasks.cancel_scope.cancel()

    try:
        async with client, await anyio.connect_tcp(host, port) as server, anyio.create_task_group() as tasks:
            tasks.start_soon(pump, client, server)
            tasks.start_soon(pump, server, client)
    except OSError:  # the endpoint has closed
        return
