"""Sends HTTP requests to engines; unreachable engines, timeouts, refusals and invalid answers are distinct errors.

A rollout worker sends thousands of requests per second, and a general HTTP client takes more of its time than the
requests themselves. So the pool speaks the part of HTTP/1.1 that engines need: a body of known length in one piece, no
cookies, no compression, no redirects.
"""

import asyncio  # noqa: TID251  (anyio has no transports and protocols)
import socket
import ssl
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Final, Self, TypeVar

import anyio
import msgspec
from aiohappyeyeballs import start_connection

from envs.remote.service_client import describe_response, parse_retry_after
from stream.errors import EngineError, EngineRefusedError
from workers.engine_api.http_connection import HttpAnswer, HttpConnection, RequestTarget, ServerAddress

QUERY_TIMEOUT_S: Final = 10.0
"""Time limit of a request that does not sample, and of connecting."""
_RETRYABLE_STATUSES: Final = (408, 429)
_BUSY_STATUSES: Final = (429, 503)
_KEEPALIVE_S: Final = 4.0
"""An idle connection is closed after this time: vLLM would close it after 5 s, perhaps as the next request arrives."""
_SECOND_ADDRESS_AFTER_S: Final = 0.25
"""If the first of a host's addresses does not answer within this time, the next one is tried in parallel."""

T = TypeVar("T")


class UnreachableError(EngineError):
    """The server did not answer: no connection, or a broken one."""


class RequestTimeoutError(EngineError):
    """A connected server did not answer in time."""


class EngineBusyError(EngineError):
    """The server refused a request for now (429 or 503), and said for how long.

    Args:
        message: the text of the error.
        retry_after_s: seconds until it may be asked again, at most a minute.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class _Server:
    """The connections to one server."""

    def __init__(self) -> None:
        self.idle: list[HttpConnection] = []
        """Connections without a request; the most recently used one is the last."""
        self.busy: set[HttpConnection] = set()
        """Connections with a request in progress."""
        self.lost_count = 0
        """Connections that the server has ended so far."""

    def take_idle(self, now: float) -> HttpConnection | None:
        while self.idle:
            connection = self.idle.pop()
            if connection.is_usable and now - connection.idle_since < _KEEPALIVE_S:
                return connection
            connection.close()
        return None

    def record_loss(self, connection: HttpConnection) -> None:
        self.lost_count += 1
        if connection in self.idle:
            self.idle.remove(connection)

    def close_idle(self, before: float) -> None:
        """Close the connections whose last request ended before this moment of the loop's time."""
        kept = [connection for connection in self.idle if connection.idle_since >= before]
        for connection in self.idle[: len(self.idle) - len(kept)]:
            connection.close()
        self.idle = kept


class ConnectionPool:
    """Connections to any number of servers; an async context manager.

    Args:
        keep_alive: reuse a connection for the next request to the same server.
    """

    def __init__(self, *, keep_alive: bool = True) -> None:
        self._keep_alive = keep_alive
        self._servers: defaultdict[ServerAddress, _Server] = defaultdict(_Server)
        self._cleaning: asyncio.TimerHandle | None = None
        self._tls: ssl.SSLContext | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._cleaning is not None:
            self._cleaning.cancel()
        for server in self._servers.values():
            for connection in (*server.idle, *server.busy):
                connection.close()
            server.idle.clear()

    async def get(self, url: str, kind: type[T], timeout_s: float = QUERY_TIMEOUT_S) -> T:
        """Send a GET request that does not sample; return the decoded answer.

        Raises:
            EngineError: no answer, a status other than 200, or a body that does not decode as `kind`.
        """
        status, payload = await self.request("GET", url, timeout_s)
        try:
            return decode_response(status, payload, url, msgspec.json.Decoder(kind))
        except EngineRefusedError as error:  # a query has no prompt to refuse, so the engine is at fault
            raise EngineError(str(error)) from error

    async def request(
        self, method: str, url: str, timeout_s: float, body: bytes | Sequence[bytes] | None = None
    ) -> tuple[int, bytes]:
        """Send a request; return status and payload, whatever the status.

        A GET is sent again, once, if the server closes a kept connection without a byte of an answer: it may have
        closed it while the request was on its way.

        Args:
            method: the HTTP method.
            url: URL of the server, with the path.
            timeout_s: deadline for the whole answer, connecting included.
            body: content of the request, in one or more parts.

        Raises:
            UnreachableError: the server could not be reached, or the connection broke.
            RequestTimeoutError: no answer within `timeout_s`.
            EngineBusyError: a POST was answered with 429 or 503 and a valid `Retry-After`.
            EngineError: the answer is not valid HTTP, or a redirect.
        """
        parts = (body,) if isinstance(body, bytes) else body or ()
        try:
            target = RequestTarget.parse(method, url)
            request = (b"%b%d\r\n\r\n" % (target.head, sum(map(len, parts))), *parts)
            answer = await self._send(target.server, url, request, timeout_s, may_repeat=method == "GET")
        except TimeoutError as error:
            raise RequestTimeoutError(f"{url}: no answer within {timeout_s:g} s") from error
        except OSError as error:
            raise UnreachableError(f"{url}: {error or type(error).__name__}") from error
        except ValueError as error:
            raise EngineError(f"{url}: {error}") from error
        if answer.location and 300 <= answer.status < 400:
            raise EngineError(f"{url} redirects to {answer.location}; redirects are not followed: name that address")
        if answer.retry_after and method == "POST" and answer.status in _BUSY_STATUSES:
            delay_s = parse_retry_after(answer.retry_after)
            if delay_s is not None:
                raise EngineBusyError(describe_response(url, answer.status, answer.payload), delay_s)
        return answer.status, answer.payload

    def abort_requests(self, base_url: str, why: str) -> None:
        """End every request in progress below this URL with an `UnreachableError`, and close its connection."""
        for server in self._servers.values():
            for connection in tuple(server.busy):
                if connection.url.startswith(f"{base_url}/"):
                    connection.abort(UnreachableError(why))

    def connection_epoch(self, base_url: str) -> int | None:
        """Return a number that stays the same while connections to the server live on; None if there is none now.

        A process that takes over another one's address does not have that one's connections.
        """
        server = self._servers.get(RequestTarget.parse("GET", base_url).server)
        return server.lost_count if server is not None and (server.idle or server.busy) else None

    async def _send(
        self, address: ServerAddress, url: str, request: Sequence[bytes], timeout_s: float, *, may_repeat: bool
    ) -> HttpAnswer:
        server, now = self._servers[address], self._loop.time()
        connection = server.take_idle(now)
        if connection is not None:
            try:
                return await self._exchange(server, connection, url, request, timeout_s)
            except ConnectionError:
                if connection.has_answer_begun or not may_repeat:
                    raise
        connection = await self._connect(server, address, url, timeout_s)
        return await self._exchange(server, connection, url, request, now + timeout_s - self._loop.time())

    async def _exchange(
        self, server: _Server, connection: HttpConnection, url: str, request: Sequence[bytes], timeout_s: float
    ) -> HttpAnswer:
        server.busy.add(connection)
        try:
            answer = await connection.exchange(url, request, timeout_s)
        finally:
            server.busy.discard(connection)
        if self._keep_alive and connection.is_usable:
            server.idle.append(connection)
            if self._cleaning is None:
                self._cleaning = self._loop.call_later(_KEEPALIVE_S, self._close_idle)
        else:
            connection.close()
        return answer

    async def _connect(self, server: _Server, address: ServerAddress, url: str, timeout_s: float) -> HttpConnection:
        try:
            with anyio.fail_after(min(timeout_s, QUERY_TIMEOUT_S)):
                return await self._open(server, address)
        except TimeoutError as error:
            if timeout_s <= QUERY_TIMEOUT_S:
                raise
            raise UnreachableError(f"{url}: no connection within {QUERY_TIMEOUT_S:g} s") from error

    async def _open(self, server: _Server, address: ServerAddress) -> HttpConnection:
        if address.has_tls and self._tls is None:
            self._tls = await anyio.to_thread.run_sync(ssl.create_default_context)  # reads certificates
        try:
            addresses = await self._loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            opened = await start_connection(addresses, happy_eyeballs_delay=_SECOND_ADDRESS_AFTER_S, interleave=1)
            try:
                _, connection = await self._loop.create_connection(
                    partial(HttpConnection, server.record_loss),
                    sock=opened,
                    ssl=self._tls if address.has_tls else None,
                    server_hostname=address.host if address.has_tls else None,
                )
            except BaseException:
                opened.close()
                raise
        except OSError as error:  # `OSError` includes the system's own time-out, which is not the request's
            why = error.strerror or error or type(error).__name__
            raise ConnectionError(f"Cannot connect to host {address.host}:{address.port}: {why}") from error
        return connection

    def _close_idle(self) -> None:
        for server in self._servers.values():
            server.close_idle(before=self._loop.time() - _KEEPALIVE_S)
        self._cleaning = None
        if any(server.idle for server in self._servers.values()):
            self._cleaning = self._loop.call_later(_KEEPALIVE_S, self._close_idle)


def decode_response(status: int, payload: bytes, url: str, decoder: "msgspec.json.Decoder[T]") -> T:
    """Return the value in the body of an answer.

    Raises:
        EngineRefusedError: status 4xx other than 408 and 429.
        EngineError: any other status than 200, or a body that does not decode.
    """
    if status != 200:
        kind = EngineRefusedError if 400 <= status < 500 and status not in _RETRYABLE_STATUSES else EngineError
        raise kind(describe_response(url, status, payload))
    try:
        return decoder.decode(payload)
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{url}: the answer cannot be decoded: {error}") from error
