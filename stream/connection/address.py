"""A server's URL in redis-py's form, and clients for it."""

import ssl
from typing import Any
from urllib.parse import urlsplit

import anyio
from redis.asyncio import ConnectionPool, Redis, SSLConnection
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from stream.connection.url import misread_part, redact_url
from stream.errors import ServerError

_MAX_CONNECTIONS = 1000
_PROBE_TIMEOUT_S = 2.0
_URL_HINT = "write redis://, rediss:// (TLS) or unix://; escape user and password with %"
SENTINEL_HINT = (
    "Sentinel names the master but holds no data, and Penstock does not ask it: name the master itself, or an address "
    "that follows it, such as a proxy or a Kubernetes service"
)
_CLUSTER_HINT = "name one node of a cluster, as redis://HOST:PORT; Penstock finds the others"


class RedisAddress:
    """A parsed server URL.

    Args:
        url: `redis://`, `rediss://` or `unix://`, with user, password, database and TLS files in redis-py's form.

    Raises:
        ServerError: the URL is not valid; the message shows no secret.
    """

    def __init__(self, url: str) -> None:
        self.display_url = redact_url(url)
        """The URL without secrets, for messages."""
        try:
            options: dict[str, Any] = dict(parse_url(url))
        except ValueError as error:  # its text may hold a part of a password
            raise ServerError(f"{self.display_url} is not a Redis URL: {_url_hint(url)}") from error
        if why := misread_part(url):
            raise ServerError(f"{self.display_url} is not a Redis URL: {why}")
        self._options = (
            {"max_connections": _MAX_CONNECTIONS}
            | options
            | {
                "retry": Retry(NoBackoff(), 0),
                "socket_timeout": None,  # `RunConnection` limits the time of each call
                "protocol": 2,
                "decode_responses": False,
                "driver_info": None,  # otherwise every connection reads the library's version from the disk
            }
        )
        self._tls = urlsplit(url).scheme == "rediss"

    async def prepare(self) -> None:
        """Check the options by making a connection object, and read the TLS files once for all connections.

        Raises:
            ServerError: the URL has an option that does not exist, or names a file that is missing or broken.
        """
        try:
            pool: Any = ConnectionPool(**self._options)
            connection = pool.make_connection()
        except (TypeError, ValueError, RedisError) as error:  # redis-py names the option, never its value
            remedy = "" if self._tls else "; TLS options need rediss://"
            raise ServerError(f"the URL {self.display_url} has an invalid option: {error}{remedy}") from error
        if not self._tls:
            return
        try:
            await anyio.to_thread.run_sync(connection.ssl_context.get)
        except (OSError, ssl.SSLError) as error:
            raise ServerError(
                f"the TLS files that the URL of {self.display_url} names cannot be used: {error}; see ssl_ca_certs, "
                "ssl_certfile and ssl_keyfile in it"
            ) from error
        self._options["connection_class"] = _connection_class(connection.ssl_context)

    def client(self, host_port: tuple[str, int] | None = None) -> "Redis":
        """Return a client for this server, or for another node of its cluster."""
        options = self._options
        if host_port is not None:
            options = {name: value for name, value in options.items() if name != "path"}
            options |= {"host": host_port[0], "port": host_port[1]}
            if "path" in self._options:  # a unix socket reaches one node only
                del options["connection_class"]
        return Redis.from_pool(ConnectionPool(**options))

    @property
    def host_port(self) -> tuple[str, int] | None:
        """Host and port; None for a unix socket."""
        if "path" in self._options:
            return None
        return self._options.get("host", "localhost"), self._options.get("port", 6379)

    async def probe(self) -> str | None:
        """Try a server that closed the connection, or did not answer, with TLS instead of plain text or the reverse.

        Returns:
            The problem, if that is the cause.
        """
        if self.host_port is None:
            return None
        with anyio.move_on_after(_PROBE_TIMEOUT_S):
            if self._tls and await _answers_plaintext(*self.host_port):
                return "it does not use TLS on this port; write redis://, or use its TLS port"
            if not self._tls and await _speaks_tls(*self.host_port):
                return "it uses TLS on this port; write rediss:// and ?ssl_ca_certs=FILE"
        return None


def _url_hint(url: str) -> str:
    """Return how to write a URL that redis-py does not know; says nothing of its content."""
    scheme, _, rest = url.partition("://")
    if "sentinel" in scheme.lower():
        return SENTINEL_HINT
    if "cluster" in scheme.lower() or "," in rest.rpartition("@")[2]:
        return _CLUSTER_HINT
    return _URL_HINT


def _connection_class(context: Any) -> type[SSLConnection]:
    class Sharing(SSLConnection):
        """A TLS connection that reads no files, since it is made on the event loop."""

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.ssl_context = context

    return Sharing


async def _speaks_tls(host: str, port: int) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        async with await anyio.connect_tcp(host, port, ssl_context=context, tls_standard_compatible=False):
            return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # refused, but by TLS
    except (OSError, anyio.BrokenResourceError, anyio.EndOfStream):
        return False


async def _answers_plaintext(host: str, port: int) -> bool:
    try:
        async with await anyio.connect_tcp(host, port) as stream:
            await stream.send(b"PING\r\n")
            return (await stream.receive(1)) in {b"+", b"-"}
    except (OSError, anyio.BrokenResourceError, anyio.EndOfStream):
        return False
