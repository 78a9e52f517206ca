"""Clients that connect and then let a server wait: for a head, for the rest of one, or for a body."""

import socket
from collections.abc import Iterable
from contextlib import suppress
from itertools import cycle
from urllib.parse import urlsplit

HEAD = b"Host: localhost\r\nContent-Type: application/json\r\n"
BEGINNINGS = {
    "nothing": b"",
    "half a head": b"GET /health HTTP/1.1\r\nHost: local",
    "half a body": b"POST /inference/v1/generate HTTP/1.1\r\n" + HEAD + b"Content-Length: 100\r\n\r\nhalf",
    "a body of unknown length": b"POST /classify HTTP/1.1\r\n"
    + HEAD
    + b"Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
}


class HalfOpen:
    """Connections to one server that never complete a request.

    Args:
        url: of the server.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = parts.hostname, parts.port
        self._beginnings = cycle(BEGINNINGS.values())
        self.sockets: list[socket.socket] = []

    def open(self, count: int, beginnings: Iterable[bytes] | None = None) -> None:
        """Open this many more connections; a busy server may refuse some."""
        sent = cycle(beginnings) if beginnings else self._beginnings
        for _ in range(count):
            client = socket.socket()
            client.settimeout(5)
            self.sockets.append(client)
            with suppress(OSError):
                client.connect(self._address)
                client.sendall(next(sent))
            client.setblocking(False)

    def drop_closed(self) -> int:
        """Forget the connections that the server has ended; return how many are left."""
        left = []
        for client in self.sockets:
            if _is_open(client):
                left.append(client)
            else:
                client.close()
        self.sockets = left
        return len(left)

    def close(self) -> None:
        """Close all."""
        for client in self.sockets:
            client.close()
        self.sockets = []


def _is_open(client: socket.socket) -> bool:
    try:
        while client.recv(65536):
            pass
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
