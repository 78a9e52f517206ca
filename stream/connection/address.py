"""A server's URL: the clients that it leads to, whether it holds a secret, and how to show it without.

A server may be the node of a cluster. All keys of a run are in one slot, so one node has the whole run at any time, and
one plain client talks to it. A client that knows all slots would do harm: while a slot is being moved it follows ASK to
a node with only some of the run's keys, where a script would find no streams and create them again. This client waits
for the end of the move instead.
"""

import contextlib
import ssl
from typing import Any
from urllib.parse import unquote, urlsplit

import anyio
import structlog
from redis.asyncio import ConnectionPool, Redis, SSLConnection
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import MovedError, RedisError

from stream.connection.server_errors import HANDLED_ERRORS
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


def has_secret(url: str) -> bool:
    """Return whether a URL has a password, or might have one: a URL that cannot be parsed counts as one that has."""
    if not url:
        return False
    from redis.asyncio.connection import parse_url  # only here: that import takes longer than `penstock queues`

    try:
        options = parse_url(url)
    except ValueError:
        return True
    return bool({"password", "ssl_password"} & options.keys()) or not is_unambiguous(url)


def redact_url(url: str) -> str:
    """Return the URL without user, password and options; only the scheme if it cannot be parsed."""
    scheme, separator, _ = url.partition("://")
    if not separator:
        return "the URL"
    if not is_unambiguous(url):
        return f"{scheme}://..."
    parts = urlsplit(url)
    return f"{scheme}://{parts.netloc.rpartition('@')[2]}{unquote(parts.path)}"


def misread_part(url: str) -> str:
    """Return what is wrong with a URL that redis-py would read in another way, or in part; empty: nothing.

    The text shows no secret.
    """
    if "://" not in url:
        return "write redis://HOST:PORT"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return ""  # redis-py refuses it
    if parts.fragment:
        return "leave out # and what follows; write %23 for # in a password"
    if parts.scheme == "unix":
        return "" if parts.path and not parts.hostname else "write unix:///FOLDER/FILE, with three slashes"
    if port == 0:
        return "0 is no port"
    database = unquote(parts.path).strip("/")
    if database and not (database.isascii() and database.isdigit()):
        return (
            "behind the host stands the number of a database, as in redis://HOST:PORT/0; write %2F for / in a password"
        )
    return ""


def is_unambiguous(url: str) -> bool:
    """Return whether a password's position is certain; an unescaped / ? # in a password moves everything after it."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return False
    return "@" not in parts.path + parts.query + parts.fragment


log = structlog.get_logger()

HostPort = tuple[str, int]


class ClusterRouter:
    """The client of the node that has the run, and the clients of nodes that had it before."""

    def __init__(self, address: RedisAddress) -> None:
        self._address = address
        self._current: HostPort | None = address.host_port
        self._known_nodes: list[HostPort] = []
        self._clients: dict[HostPort | None, Redis] = {self._current: address.client()}

    @property
    def redis(self) -> "Redis":
        """The client of the node that has the run, as far as known."""
        return self._clients[self._current]

    def redirect(self, error: MovedError) -> None:
        """Switch to the node that a MOVED reply names as the owner of the run's slot."""
        self._switch_to((self._host_name(error.host.encode()), error.port))

    def try_next_node(self) -> None:
        """Switch to another known node after the current one failed; every node can name the one with the run."""
        if self._known_nodes:
            at = self._known_nodes.index(self._current) if self._current in self._known_nodes else -1
            self._switch_to(self._known_nodes[(at + 1) % len(self._known_nodes)])

    async def refresh(self) -> None:
        """Ask the current node for the other nodes; if it does not answer, the known nodes stay as they are."""
        with contextlib.suppress(*HANDLED_ERRORS):
            slots: Any = await self.redis.execute_command("CLUSTER SLOTS")  # type: ignore[no-untyped-call]
            nodes = {(self._host_name(host), port) for _, _, *owners in slots for host, port, *_ in owners}
            seed = {self._address.host_port} - {None}
            self._known_nodes = [*seed, *sorted(nodes - seed)]  # type: ignore[list-item]

    async def aclose(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            await client.aclose()

    def _host_name(self, host: bytes | None) -> str:
        """Return a node's host. A node that does not know its own name sends none: it is the host we reached."""
        return host.decode() if host else self._current[0] if self._current else "localhost"

    def _switch_to(self, node: HostPort) -> None:
        if node == self._current:
            return
        log.info("redis.redirected", node=f"{node[0]}:{node[1]}")
        if node not in self._clients:
            self._clients[node] = self._address.client(node)
        self._current = node
