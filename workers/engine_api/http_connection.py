"""One HTTP/1.1 connection to an engine, with one request at a time; httptools parses the bytes of answers."""

import asyncio  # noqa: TID251  (anyio has no transports and protocols)
from base64 import b64encode
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple, cast
from urllib.parse import unquote, urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser
from msgspec import Struct

_FINAL: Final = 200
"""Lower statuses are interim answers; another one follows."""
_NOTED_HEADERS: Final = frozenset(
    (b"content-length", b"transfer-encoding", b"location", b"retry-after", b"content-encoding")
)
_CLOSED: Final = "the server closed the connection"
_MAX_HEAD_BYTES: Final = 1_000_000
"""Size of status line and headers, interim answers included; beyond it the parser takes quadratic time."""
MAX_ANSWER_BYTES: Final = 256_000_000
"""Twice the answer of a million tokens."""


class HttpAnswer(Struct, frozen=True):
    """Answer of a server, whatever its status."""

    status: int
    payload: bytes
    location: str
    """Where a redirect leads; mostly empty."""
    retry_after: str
    """When a busy server wants to be asked again, in its own words; mostly empty."""


class HttpConnection(asyncio.Protocol):
    """A connection that `loop.create_connection` opens.

    Args:
        on_lost: called once when the server ended the connection; not after `close`.

    Attributes:
        url: of the request in progress.
        has_answer_begun: the server sent bytes after the last request.
        idle_since: the loop's time of the last answer.
    """

    def __init__(self, on_lost: "Callable[[HttpConnection], None]") -> None:
        self.url = ""
        self.has_answer_begun = False
        self.idle_since = 0.0
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._parser = HttpResponseParser(self)
        self._answer: asyncio.Future[HttpAnswer] | None = None
        self._body: list[bytes] = []
        self._status, self._location, self._retry_after, self._encoding = 0, "", "", ""
        self._received = 0
        self._has_length = self._is_complete = self._is_reusable = self._is_closed = False

    @property
    def is_usable(self) -> bool:
        """Whether another request can be sent."""
        return self._is_reusable and not self._is_closed and not self._transport.is_closing()

    async def exchange(self, url: str, request: Sequence[bytes], timeout_s: float) -> HttpAnswer:
        """Send a request and wait for its answer. Any failure, and cancelling the caller, closes the connection.

        Args:
            url: what is asked, for `ConnectionPool.abort_requests`.
            request: the bytes to send, in parts.
            timeout_s: for the whole answer.

        Raises:
            TimeoutError: no answer in time.
            OSError: the connection broke.
            ValueError: the answer is not valid HTTP, too long, or compressed.
        """
        self.url, self.has_answer_begun = url, False
        self._status, self._received, self._is_complete, self._is_reusable = 0, 0, False, False
        if self._is_closed or self._transport.is_closing():  # uvloop would raise a RuntimeError
            raise ConnectionResetError(_CLOSED)
        answer: asyncio.Future[HttpAnswer] = self._loop.create_future()
        self._answer = answer
        deadline = self._loop.call_later(timeout_s, self._time_out)
        try:
            self._transport.writelines(request)
            return await answer
        except BaseException:
            self.close()
            raise
        finally:
            deadline.cancel()
            self._answer = None

    def _time_out(self) -> None:
        self.abort(TimeoutError())

    def abort(self, error: Exception) -> None:
        """End the request in progress with this error."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    def close(self) -> None:
        """Close the connection at once, so that the server stops working on a request in progress."""
        if not self._is_closed:
            self._is_closed = True
            self._transport.abort()

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self.has_answer_begun = True
        if self._answer is None or self._is_complete:  # nobody asked
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade:
            self.abort(ValueError("the answer switches to another protocol, which nobody asked for"))
        except HttpParserError as error:
            self._is_reusable = False
            if not self._is_complete:  # otherwise only what follows the answer is wrong
                self.abort(ValueError(f"the answer is not valid HTTP: {error}"))
        if self._is_complete:
            self._finish()
            return
        self._received += len(data)
        limit = MAX_ANSWER_BYTES if self._status >= _FINAL else _MAX_HEAD_BYTES
        if self._received > limit:
            what = "answer" if self._status >= _FINAL else "answer's head"
            self.abort(ValueError(f"the {what} has more than {limit:,} bytes"))

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        if self._is_closed:
            return
        self._is_closed = True
        if error is None and self._status >= _FINAL and not self._has_length and not self._is_complete:
            self._finish()  # the end of the connection is that of the body
        self.abort(ConnectionResetError(str(error or _CLOSED)))
        self._on_lost(self)

    # Called by the parser

    def on_message_begin(self) -> None:
        """Expect an answer, perhaps after interim ones, but no second one."""
        if self._is_complete:
            raise ValueError("more than one answer")
        self._body, self._status, self._has_length = [], 0, False
        self._location = self._retry_after = self._encoding = ""

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note how the end of the body is found, how it is encoded, and where or when to ask instead."""
        name = name.lower()
        if name not in _NOTED_HEADERS:
            return
        if name == b"content-length" or (name == b"transfer-encoding" and value.lower().endswith(b"chunked")):
            self._has_length = True
        elif name == b"location":
            self._location = value.decode("latin-1")
        elif name == b"retry-after":
            self._retry_after = value.decode("latin-1")
        elif name == b"content-encoding":
            self._encoding = value.decode("latin-1").strip()

    def on_headers_complete(self) -> None:
        """Note the status."""
        self._status = self._parser.get_status_code()

    def on_body(self, part: bytes) -> None:
        """Collect the body."""
        self._body.append(part)

    def on_message_complete(self) -> None:
        """Note that the answer is complete, unless it is only an interim one."""
        if self._status >= _FINAL:
            self._is_complete = True
            self._is_reusable = self._parser.should_keep_alive()

    def _finish(self) -> None:
        if self._encoding and self._encoding.lower() != "identity":
            self.abort(ValueError(f"the answer is compressed ({self._encoding}), though the request forbids it"))
            return
        if self._transport.get_write_buffer_size():  # the server may never read the rest of this request
            self._is_reusable = False
        body = self._body
        payload = body[0] if len(body) == 1 else b"".join(body)
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(HttpAnswer(self._status, payload, self._location, self._retry_after))
            self.idle_since = self._loop.time()


_PORTS = {"http": 80, "https": 443}


class ServerAddress(NamedTuple):
    """A server; requests to one share connections."""

    host: str
    port: int
    has_tls: bool


class RequestTarget(NamedTuple):
    """A method and a URL, parsed once."""

    server: ServerAddress
    head: bytes
    """The request up to the length of its body."""

    @classmethod
    @lru_cache(maxsize=1024)
    def parse(cls, method: str, url: str) -> "RequestTarget":
        """Parse a URL.

        Raises:
            ValueError: it is not an absolute URL of a web server.
        """
        parts = urlsplit(url)
        if parts.scheme not in _PORTS or not parts.hostname:
            raise ValueError("not a valid URL; it must begin with http://HOST or https://HOST")
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        host = parts.netloc.rpartition("@")[2].encode("idna" if not parts.netloc.isascii() else "ascii").decode()
        if not f"{path}{host}".isascii() or not f"{path}{host}".isprintable() or " " in f"{path}{host}":
            raise ValueError("not a valid URL; other characters than ASCII must be percent-encoded")
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "User-Agent: penstock", "Accept: */*"]
        lines.append("Accept-Encoding: identity")  # without it a server may compress its answer
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            lines.append(f"Authorization: Basic {b64encode(pair.encode()).decode()}")
        lines += ["Content-Type: application/json", "Content-Length: "]
        port = _PORTS[parts.scheme] if parts.port is None else parts.port
        address = ServerAddress(parts.hostname, port, parts.scheme == "https")
        return cls(address, "\r\n".join(lines).encode())
