"""Which requests the HTTP servers of a run answer: under which names, and nothing that another site's page asks.

A browser sends requests to any address that its machine reaches, also to servers on the machine itself, on behalf of
whatever page it shows. Two headers that a page cannot forge tell such requests apart. `Host` is the name by which the
page knows the server: another site's page may let its own name resolve to this machine (DNS rebinding), and would then
count as a page of this server. `Origin` is the site that the page came from.
"""

import ipaddress
import socket
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

from aiohttp import hdrs, web
from msgspec import Struct

_READS: Final = frozenset({hdrs.METH_GET, hdrs.METH_HEAD})
_OWN_SITES: Final = frozenset({"same-origin", "none"})
_PRIVATE_DOMAINS: Final = (".localhost", ".local", ".internal", ".svc", ".lan", ".home.arpa")
"""Ends of names that nobody can buy, as private networks and Kubernetes use them."""


class Refusal(Struct, frozen=True):
    """Why a request is not answered."""

    status: int
    why: str


class AccessRules(Struct, frozen=True, kw_only=True):
    """Which requests a server answers at all, whatever its routes.

    A server that only its own machine reaches is asked as `localhost` or by a loopback address. Any other server may be
    asked by an IP address, by a name without a dot or in a private domain (compose and Kubernetes services, machines of
    a local network), by this machine's host name, and by the names that are given.
    """

    host: str
    """Address or name that the server listens at."""
    names: tuple[str, ...] = ()
    """More names at which clients reach it."""
    has_token: bool = False
    """The server itself asks every request for a token. Then any name will do: another site's page has no token."""
    takes_forms: bool = False
    """The server itself asks for a token whatever changes something, so that forms need not be JSON."""

    def find_refusal(self, request: web.BaseRequest) -> Refusal | None:
        """Return why a request is refused; None if the server may answer it."""
        host = request.headers.get(hdrs.HOST, "")
        if not self.allows_name(_name(host)):
            return Refusal(
                403,
                f"{host!r} is not a name of this server: ask it as {self._known_names()}, "
                "or start it with that name as its host",
            )
        is_read = request.method in _READS
        if _is_of_another_site(request, is_read=is_read):
            origin = request.headers.get(hdrs.ORIGIN, "none")
            return Refusal(403, f"a page of another site sent this request (Origin: {origin})")
        if not is_read and not self.takes_forms and request.content_type != "application/json":
            return Refusal(
                415, f"a {request.method} needs the header 'Content-Type: application/json', also without a body"
            )
        return None

    def _known_names(self) -> str:
        return "localhost or 127.0.0.1" if is_loopback(self.host) else "an IP address"

    def allows_name(self, name: str) -> bool:
        """Whether the server may be asked by this name, which comes without a port."""
        if not name or self.has_token:
            return bool(name)
        if is_loopback(name) or name == self.host.lower() or name in self.names:
            return True
        if is_loopback(self.host):
            return False
        is_private = "." not in name or name.endswith(_PRIVATE_DOMAINS)
        return is_private or _is_address(name) or name == socket.gethostname().lower()


@lru_cache(maxsize=64)
def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_same_origin(request: web.BaseRequest) -> bool:
    """Return whether a page of this server sent the request: browsers send the origin with every POST."""
    if request.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
        return False
    origin = urlsplit(request.headers.get(hdrs.ORIGIN, ""))
    return bool(origin.netloc) and origin.netloc == request.headers.get(hdrs.HOST)


def _is_of_another_site(request: web.BaseRequest, *, is_read: bool) -> bool:
    """Return whether a browser says that another site's page wants to change something here, or to read an answer."""
    if hdrs.ORIGIN in request.headers:
        return not is_same_origin(request)
    return not is_read and request.headers.get("Sec-Fetch-Site", "none") not in _OWN_SITES


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name(host: str) -> str:
    """Return the name in a Host header, without port and brackets; empty if it is none."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""
