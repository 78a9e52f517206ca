"""Where a request goes: the server to connect to, and the beginning of the request's bytes."""

from base64 import b64encode
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

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
