"""Connections of an HTTP server: a limit of their number, and of the time that a request may take to arrive.

A client that connects and sends nothing, half of a head or half of a body, or that reads no answer, holds a descriptor
and memory. Such connections end after a time; if there are too many before that, the oldest makes room for the newest,
so that clients with whole requests always get in.
"""

import asyncio  # noqa: TID251  (anyio has no transports and protocols)
import errno
import os
import resource
import socket
from collections.abc import Callable
from typing import Final, cast

import anyio
import structlog
from aiohttp import web
from anyio.abc import SocketAttribute

from stream.errors import EngineError

log = structlog.get_logger()

MAX_CONNECTIONS: Final = 1024
HEAD_S: Final = 10.0
"""For the whole head of the first request."""
IDLE_S: Final = 75.0
"""From an answer to the whole head of the next request."""
BODY_S: Final = 60.0
"""From the head to the end of the body."""
STALLED_S: Final = 60.0
"""While the client does not read an answer."""
_NEVER: Final = float("inf")
_LOG_INTERVAL_S: Final = 60.0
_BACKLOG: Final = 1024
"""Connections that wait in the system until they are accepted."""
_ACCEPTED_AT_ONCE: Final = 16
"""In one round of the event loop: requests of accepted connections are read before others take their place."""
_OUT_OF_FILES_S: Final = 1.0


class ConnectionLimit:
    """The connections of one server.

    At most half of the files that the process may open are connections: the rest is for the process's own work.

    Args:
        max_connections: at most.
    """

    def __init__(self, max_connections: int) -> None:
        self._max_connections = min(max_connections, _max_files() // 2)
        self._loop = asyncio.get_running_loop()
        self._server: Callable[[], web.RequestHandler]
        self._sockets: list[socket.socket] = []
        self._opening: set[asyncio.Task[object]] = set()
        self._by_handler: dict[web.RequestHandler, _Connection] = {}
        self._waiting: dict[_Connection, None] = {}
        """Those that wait for their client to send something, the one that has waited longest first."""
        self._count = 0
        """Number of open connections, those that are being accepted included."""
        self._is_accepting = False
        self._address = ""
        self._ended_count = 0
        self._logged_at = -_LOG_INTERVAL_S

    async def start_accepting(self, server: Callable[[], web.RequestHandler], host: str, port: int) -> int:
        """Accept connections at an address until `stop_accepting`. Returns the port.

        Args:
            server: makes aiohttp's protocol for each connection.
            host: address to listen on.
            port: 0 for a free one.

        Raises:
            EngineError: the address is taken, or none of this machine's.
        """
        self._server = server
        try:
            listener = await anyio.create_tcp_listener(local_host=host or None, local_port=port, backlog=_BACKLOG)
        except OSError as error:
            is_taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
            remedy = "choose another port" if is_taken else "name an address of this machine"
            raise EngineError(f"{cannot_listen(host, port, error)}; {remedy}") from error
        self._sockets = [part.extra(SocketAttribute.raw_socket) for part in listener.listeners]  # noqa: S610  (not Django)
        port = int(self._sockets[0].getsockname()[1])
        self._address = f"{host}:{port}"
        self._accept_again()
        return port

    def stop_accepting(self) -> None:
        """Close the listening sockets."""
        self._pause_accepting()
        for listening in self._sockets:
            listening.close()
        self._sockets = []

    def _accept_again(self) -> None:
        if not self._is_accepting:
            for listening in self._sockets:
                self._loop.add_reader(listening, self._accept, listening)
            self._is_accepting = bool(self._sockets)

    def _pause_accepting(self) -> None:
        self._is_accepting = False
        for listening in self._sockets:
            self._loop.remove_reader(listening)

    def _accept(self, listening: socket.socket) -> None:
        """Accept what waits at a socket, some at a time."""
        for _ in range(_ACCEPTED_AT_ONCE):
            if self._is_full and not self._waiting:
                self._log_limit()
                self._pause_accepting()  # until one of the connections has its answer
                return
            try:
                client, _address = listening.accept()
            except BlockingIOError:
                return
            except ConnectionError:  # the client has left already
                continue
            except OSError as error:
                log.warning("http.cannot_accept", address=self._address, why=str(error), again_after_s=_OUT_OF_FILES_S)
                self._pause_accepting()
                self._loop.call_later(_OUT_OF_FILES_S, self._accept_again)
                return
            if self._is_full:
                self._make_room()
            self._count += 1
            client.setblocking(False)
            # A callback of the loop cannot wait; this ends at once.
            opening = self._loop.create_task(self._open(client))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)

    async def _open(self, client: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: _Connection(self, self._server()), client)
        except OSError:  # the client has left already
            self._count -= 1
            client.close()

    def begin_request(self, request: web.Request) -> None:
        """Note that the head of a request is there; a middleware calls it, in the task that answers the request."""
        connection = self._by_handler.get(request.protocol)
        task = asyncio.current_task()
        if connection is None or task is None:  # the connection was lost meanwhile
            return
        connection.begin(request)
        request.content.on_eof(lambda: connection.expect_answer(request))
        task.add_done_callback(lambda _: connection.end(request))  # the task is done once the answer was sent

    def close(self) -> None:
        """End what is left after the server was closed."""
        for connection in tuple(self._by_handler.values()):
            connection.abort()

    @property
    def _is_full(self) -> bool:
        return self._count >= self._max_connections

    def _make_room(self) -> None:
        """End the connection that has waited longest for its client."""
        next(iter(self._waiting)).abort()
        self._ended_count += 1
        self._log_limit()

    def add(self, connection: "_Connection", handler: web.RequestHandler) -> None:
        """Add a new connection."""
        self._by_handler[handler] = connection
        self._waiting[connection] = None

    def discard(self, connection: "_Connection", handler: web.RequestHandler) -> None:
        """Forget a connection that has ended."""
        if self._by_handler.pop(handler, None) is not None:
            self._count -= 1
            self._waiting.pop(connection, None)
            self._accept_again()

    def set_waiting(self, connection: "_Connection") -> None:
        """Note that a connection waits for its client from now on: it may have to make room."""
        self._waiting.pop(connection, None)
        self._waiting[connection] = None
        self._accept_again()

    def set_answering(self, connection: "_Connection") -> None:
        """Note that a whole request is there: its connection makes no room for others."""
        self._waiting.pop(connection, None)

    def _log_limit(self) -> None:
        now = self._loop.time()
        if now - self._logged_at < _LOG_INTERVAL_S:
            return
        log.warning(
            "http.connections_limited",
            address=self._address,
            limit=self._max_connections,
            ended=self._ended_count,
            remedy="look for clients that connect without sending requests; more connections need a larger ulimit -n",
        )
        self._logged_at, self._ended_count = now, 0


class _Connection(asyncio.Protocol):
    """One connection: passes everything on to aiohttp's protocol, and ends if the client keeps the server waiting."""

    def __init__(self, limit: ConnectionLimit, handler: web.RequestHandler) -> None:
        self._limit, self._handler = limit, handler
        self._loop = asyncio.get_running_loop()
        self._request: web.Request | None = None
        """The one that is being answered."""
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = _NEVER
        self._stalled_deadline = _NEVER
        self._is_ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)
        self._limit.add(self, self._handler)
        self._handler.connection_made(transport)
        self._wait(HEAD_S)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._handler.data_received(data)

    def eof_received(self) -> None:
        """See `asyncio.Protocol`."""
        self._handler.eof_received()

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._stalled_deadline = self._loop.time() + STALLED_S
        self._schedule(self._stalled_deadline)
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._stalled_deadline = _NEVER
        self._handler.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._forget()
        self._handler.connection_lost(error)

    def begin(self, request: web.Request) -> None:
        """Expect the body of a request, whose head is there."""
        self._request = request
        if not self._is_ended:
            self._limit.set_waiting(self)
            self._wait(BODY_S)

    def expect_answer(self, request: web.Request) -> None:
        """Let the server take its time: the whole request is there."""
        if self._request is request and not self._is_ended:
            self._limit.set_answering(self)
            self._deadline = _NEVER

    def end(self, request: web.Request) -> None:
        """Expect another request: the answer was sent."""
        if self._request is request:  # a client may send the next one before
            self._request = None
            if not self._is_ended:
                self._limit.set_waiting(self)
                self._wait(IDLE_S)

    def abort(self) -> None:
        """End the connection at once."""
        self._forget()
        self._transport.abort()

    def _forget(self) -> None:
        self._is_ended = True
        if self._timer is not None:
            self._timer.cancel()
        self._limit.discard(self, self._handler)

    def _wait(self, time_s: float) -> None:
        self._deadline = self._loop.time() + time_s
        self._schedule(self._deadline)

    def _schedule(self, at: float) -> None:
        """Check the deadline at a time, unless a check comes before: most deadlines are replaced by later ones."""
        if self._timer is not None and self._timer.when() > at:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self._loop.call_at(at, self._check)

    def _check(self) -> None:
        self._timer = None
        deadline = min(self._deadline, self._stalled_deadline)
        if self._loop.time() >= deadline:
            self.abort()
        elif deadline != _NEVER:
            self._schedule(deadline)


def _max_files() -> int:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if files == resource.RLIM_INFINITY else files


def cannot_listen(host: str, port: int, error: OSError | OverflowError) -> EngineError:
    """Return the error of a server that cannot listen, without what asyncio repeats of the address."""
    number = getattr(error, "errno", None) or 0
    why = os.strerror(number) if number > 0 else getattr(error, "strerror", None) or str(error)
    return EngineError(f"cannot listen on {host}{f':{port}' if port else ''}: {why[:1].lower()}{why[1:]}")


def free_port(host: str, port: int = 0) -> int:
    """Return the port if it is free now, or any free port for 0; the server should bind it within seconds.

    Args:
        host: address of the server; empty: every address of this machine.
        port: 0 for any.

    Raises:
        EngineError: this machine does not have the address, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore TIME_WAIT
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    except (OSError, OverflowError) as error:  # a port above 65535 is the latter
        raise cannot_listen(host, port, error) from error
