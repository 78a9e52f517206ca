"""Connections of an HTTP server: a limit of their number, and of the time that a request may take to arrive.

A client that connects and sends nothing, half of a head or half of a body, or that reads no answer, holds a descriptor
and memory. Such connections end after a time; if there are too many before that, the oldest makes room for the newest,
so that clients with whole requests always get in.
"""

import asyncio  # noqa: TID251  (anyio has no transports and protocols)
import resource
from typing import Final, cast

import structlog
from aiohttp import web

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
_MAX_BACKLOG: Final = 1024
_BUSY: Final = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class ConnectionLimit:
    """The connections of one server.

    At most half of the files that the process may open are connections: the rest is for the process's own work.

    Args:
        max_connections: at most.
    """

    def __init__(self, max_connections: int) -> None:
        files = _max_files()
        self._max_connections = min(max_connections, files // 2)
        self._backlog = min(_MAX_BACKLOG, files // 4)
        """Connections that the system holds until they are accepted; an event loop may accept all of them at once."""
        self._arriving: dict[_Connection, None] = {}
        """Without a whole request, the oldest first."""
        self._idle: dict[_Connection, None] = {}
        """Between two requests, the one that has waited longest first."""
        self._by_handler: dict[web.RequestHandler, _Connection] = {}
        self._address = ""
        self._ended_count = 0
        self._logged_at = -_LOG_INTERVAL_S

    async def accept(self, server: web.Server, host: str, port: int) -> asyncio.Server:
        """Listen at an address.

        Args:
            server: makes aiohttp's protocol for each connection.
            host: address to listen on.
            port: 0 for a free one.

        Raises:
            EngineError: the address is taken, or none of this machine's.
        """
        loop = asyncio.get_running_loop()
        try:
            listening = await loop.create_server(lambda: _Connection(self, server), host, port, backlog=self._backlog)
        except OSError as error:
            raise EngineError(f"cannot listen on {host}:{port}: {error}; choose another port") from error
        self._address = f"{host}:{listening.sockets[0].getsockname()[1]}"
        return listening

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

    def make_room(self) -> bool:
        """Let another connection in, if need be by ending the oldest that brings no request.

        Returns False if all connections wait for answers.
        """
        if len(self._by_handler) < self._max_connections:
            return True
        oldest = next(iter(self._arriving), None) or next(iter(self._idle), None)
        if oldest is not None:
            oldest.abort()
        self._log_limit()
        return oldest is not None

    def add(self, connection: "_Connection", handler: web.RequestHandler) -> None:
        """Add a new connection."""
        self._by_handler[handler] = connection
        self._arriving[connection] = None

    def discard(self, connection: "_Connection", handler: web.RequestHandler) -> None:
        """Forget a connection that has ended."""
        self._by_handler.pop(handler, None)
        self._leave(connection)

    def set_arriving(self, connection: "_Connection") -> None:
        """Note that the body of a request is expected."""
        self._leave(connection)
        self._arriving[connection] = None

    def set_answering(self, connection: "_Connection") -> None:
        """Note that a whole request is there: its connection makes no room for others."""
        self._leave(connection)

    def set_idle(self, connection: "_Connection") -> None:
        """Note that an answer was sent."""
        self._leave(connection)
        self._idle[connection] = None

    def _leave(self, connection: "_Connection") -> None:
        self._arriving.pop(connection, None)
        self._idle.pop(connection, None)

    def _log_limit(self) -> None:
        self._ended_count += 1
        now = asyncio.get_running_loop().time()
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

    def __init__(self, limit: ConnectionLimit, server: web.Server) -> None:
        self._limit, self._server = limit, server
        self._loop = asyncio.get_running_loop()
        self._handler: web.RequestHandler | None = None
        """None if there are too many connections."""
        self._request: web.Request | None = None
        """The one that is being answered."""
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = _NEVER
        self._stalled_deadline = _NEVER
        self._is_ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)
        if not self._limit.make_room():
            self._transport.write(_BUSY)
            self._transport.close()
            return
        self._handler = self._server()
        self._limit.add(self, self._handler)
        self._handler.connection_made(transport)
        self._wait(HEAD_S)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._handler is not None:
            self._handler.data_received(data)

    def eof_received(self) -> None:
        """See `asyncio.Protocol`."""
        if self._handler is not None:
            self._handler.eof_received()

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._stalled_deadline = self._loop.time() + STALLED_S
        self._schedule(self._stalled_deadline)
        if self._handler is not None:
            self._handler.pause_writing()

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._stalled_deadline = _NEVER
        if self._handler is not None:
            self._handler.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._forget()
        if self._handler is not None:
            self._handler.connection_lost(error)

    def begin(self, request: web.Request) -> None:
        """Expect the body of a request, whose head is there."""
        self._request = request
        if not self._is_ended:
            self._limit.set_arriving(self)
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
                self._limit.set_idle(self)
                self._wait(IDLE_S)

    def abort(self) -> None:
        """End the connection at once."""
        self._forget()
        self._transport.abort()

    def _forget(self) -> None:
        self._is_ended = True
        if self._timer is not None:
            self._timer.cancel()
        if self._handler is not None:
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
