"""Where engines are: URLs as people write them, and names that stand for several."""

import socket
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

import anyio

from stream.errors import SettingsError

_DNS_TIMEOUT_S: Final = 10.0
_MAX_MISSES: Final = 3
"""An address is gone when it is missing from so many answers in a row: some name servers tell of a few at a time."""


def normalize_engine_url(text: str, source: str = "") -> str:
    """An engine's base URL as it is known by everywhere: `http://HOST:PORT` or `https://...`, no slash at its end.

    Args:
        text: what somebody wrote.
        source: it stands, for the message.

    Raises:
        SettingsError: it is none.
    """
    named = f"{source}: {text!r}" if source else repr(text)
    example = "write it as http://HOST:PORT"
    try:
        parts = urlsplit(text.strip())
        port = parts.port
    except ValueError as error:
        raise SettingsError(f"{named} is no URL of an engine: {error}; {example}") from error
    if parts.scheme not in {"http", "https"} or not parts.hostname or any(map(str.isspace, parts.netloc + parts.path)):
        raise SettingsError(f"{named} is no URL of an engine; {example}")
    if parts.username is not None or parts.password is not None:
        raise SettingsError(
            f"an engine's URL{' in ' + source if source else ''} bears a password, which logs would show"
        )
    if parts.query or parts.fragment:
        raise SettingsError(f"{named} has a query or a fragment, which an engine's base URL cannot have; {example}")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}{f':{port}' if port is not None else ''}{parts.path.rstrip('/')}"


async def resolve_engines(url: str) -> list[str]:
    """The engines that a URL's host name stands for: one to each address, in a fixed order.

    A machine that has addresses of both families is there once: IPv4 counts where there is any.

    Raises:
        OSError: the name does not resolve, or nobody said within a time.
    """
    parts = urlsplit(url)
    with anyio.fail_after(_DNS_TIMEOUT_S):
        found = await anyio.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
    addresses = sorted({ip_address(place[0].partition("%")[0]) for *_, place in found}, key=lambda a: (a.version, a))
    alike = [address for address in addresses if address.version == addresses[0].version]
    hosts = [f"[{address}]" if address.version == 6 else str(address) for address in alike]
    return [f"{parts.scheme}://{host}:{parts.port or 80}{parts.path}" for host in hosts]


def merge_dns_answer(misses: dict[str, int], urls: list[str]) -> dict[str, int]:
    """What is known after another answer of the name server: how often in a row each engine was missing from it."""
    missed = {url: misses + 1 for url, misses in misses.items() if url not in urls and misses + 1 < _MAX_MISSES}
    return missed | dict.fromkeys(urls, 0)
