"""The engines of a run: those that `engine.urls` names one by one, those behind a DNS name, and those in a file."""

import socket
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Final, Self
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import structlog

from stream.errors import SettingsError
from workers.settings.training import DNS_PREFIX, FILE_PREFIX

log = structlog.get_logger()

_LOOKUP_INTERVAL_S: Final = 3.0
"""Seconds between two lookups of DNS names and files."""


class EngineDiscovery:
    """The current engines of a run, updated while `watch` runs.

    Args:
        entries: what `engine.urls` lists.

    Attributes:
        urls: base URLs without a slash at their end, without duplicates, in the order of the entries.
        changed: set at the next change of `urls`, then replaced by a new event.

    Raises:
        SettingsError: a URL is malformed.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        self._changing = [entry for entry in entries if entry.startswith((DNS_PREFIX, FILE_PREFIX))]
        self._known: dict[str, dict[str, int]] = {
            entry: {} if entry in self._changing else {normalize_engine_url(entry, "engine.urls"): 0}
            for entry in entries
        }
        """For each entry its engines, and how many lookups in a row lacked them."""
        self._failing: set[str] = set()
        self.changed = anyio.Event()
        self.urls = self._known_urls()

    @classmethod
    async def look_up(cls, entries: Sequence[str]) -> Self:
        """Return the current engines of a run.

        Raises:
            SettingsError: a URL is malformed.
        """
        discovery = cls(entries)
        await discovery._refresh()
        return discovery

    @property
    def empty_reason(self) -> str:
        """Why the run has no engine, as a message for operators."""
        if self._changing:
            return f"the run has no engine: {', '.join(self._changing)} (engine.urls) has none; name one there"
        return f"the run has no engine: engine.urls is empty; name one there, or a file of them as {FILE_PREFIX}PATH"

    async def watch(self) -> None:
        """Follow DNS names and files forever; returns at once if there are neither."""
        while self._changing:
            await anyio.sleep(_LOOKUP_INTERVAL_S)
            await self._refresh()

    async def _refresh(self) -> None:
        """Look up names and files; while one cannot be looked up, its last engines stay valid."""
        for entry in self._changing:
            try:
                engines = await find_engines(entry)
            except (OSError, UnicodeError, SettingsError) as error:
                if entry not in self._failing:
                    self._failing.add(entry)
                    known = len(self._known[entry])
                    log.warning("engines.lookup_failed", entry=entry, why=explain_lookup(error), known=known)
                continue
            if entry in self._failing:
                self._failing.remove(entry)
                log.info("engines.lookup_recovered", entry=entry, engines=len(engines))
            is_name = entry.startswith(DNS_PREFIX)
            self._known[entry] = merge_dns_answer(self._known[entry] if is_name else {}, engines)
        urls = self._known_urls()
        added, removed = sorted(set(urls) - set(self.urls)), sorted(set(self.urls) - set(urls))
        self.urls = urls
        if added or removed:
            log.info("engines.changed", added=added, removed=removed)
            changed, self.changed = self.changed, anyio.Event()
            changed.set()

    def _known_urls(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(url for engines in self._known.values() for url in engines))


_DNS_TIMEOUT_S: Final = 10.0
_MAX_MISSES: Final = 3
"""Consecutive DNS answers without an address after which its engine is removed: some servers return only a few."""


def normalize_engine_url(text: str, source: str = "") -> str:
    """Return an engine's base URL as `http://HOST:PORT` or `https://...`, without a slash at its end.

    Args:
        text: URL from a user.
        source: where the user wrote it, for messages; for example `engine.urls`.

    Raises:
        SettingsError: the text is not an HTTP URL, or has a password, a query or a fragment.
    """
    named = f"{source}: {text!r}" if source else repr(text)
    example = "write it as http://HOST:PORT"
    try:
        parts = urlsplit(text.strip())
        port = parts.port
    except ValueError as error:
        raise SettingsError(f"{named} is not the URL of an engine: {error}; {example}") from error
    if parts.scheme not in {"http", "https"} or not parts.hostname or any(map(str.isspace, parts.netloc + parts.path)):
        raise SettingsError(f"{named} is not the URL of an engine; {example}")
    if port == 0:
        raise SettingsError(f"{named} has port 0, where no engine can listen; {example}")
    if parts.username is not None or parts.password is not None:
        where = f" in {source}" if source else ""
        raise SettingsError(f"an engine's URL{where} contains a password, which logs would show")
    if parts.query or parts.fragment:
        raise SettingsError(f"{named} has a query or a fragment, which an engine's base URL cannot have; {example}")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}{f':{port}' if port is not None else ''}{parts.path.rstrip('/')}"


async def find_engines(entry: str) -> list[str]:
    """Return the URLs of the engines that an entry of `engine.urls` stands for at this moment.

    Raises:
        SettingsError: the entry, or a line of its file, is no engine's URL; or its file has no line.
        OSError: a DNS name does not resolve in time, or a file cannot be read.
        UnicodeError: a label of the DNS name is empty or too long, or the file is not UTF-8.
    """
    if entry.startswith(DNS_PREFIX):
        return await resolve_engines(normalize_engine_url(entry.removeprefix(DNS_PREFIX), "engine.urls"))
    if entry.startswith(FILE_PREFIX):
        return await anyio.to_thread.run_sync(read_engine_file, Path(entry.removeprefix(FILE_PREFIX)))
    return [normalize_engine_url(entry, "engine.urls")]


def explain_lookup(error: Exception) -> str:
    """Return why `find_engines` found none, as a message for operators."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) or "no answer in time"


def read_engine_file(path: Path) -> list[str]:
    """Return the URLs in a file with one a line; a `#` begins a comment. Blocks.

    Raises:
        SettingsError: a line is no engine's URL, or there is none.
        OSError: the file cannot be read.
        UnicodeError: it is not UTF-8.
    """
    lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    urls = [normalize_engine_url(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line]
    if not urls:
        raise SettingsError(f"{path} has no URL; write one a line")
    return urls


async def resolve_engines(url: str) -> list[str]:
    """Return one URL per address of the URL's host name, in a fixed order.

    Only IPv4 addresses are returned if there are any: a machine with addresses of both families is one engine.

    Raises:
        OSError: the name does not resolve, or the name server does not answer in time.
    """
    parts = urlsplit(url)
    with anyio.fail_after(_DNS_TIMEOUT_S):
        found = await anyio.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
    addresses = sorted({ip_address(place[0].partition("%")[0]) for *_, place in found}, key=lambda a: (a.version, a))
    same_family = [address for address in addresses if address.version == addresses[0].version]
    hosts = [f"[{address}]" if address.version == 6 else str(address) for address in same_family]
    return [f"{parts.scheme}://{host}:{parts.port or 80}{parts.path}" for host in hosts]


def merge_dns_answer(misses: dict[str, int], urls: list[str]) -> dict[str, int]:
    """Return the known engines after another DNS answer.

    Args:
        misses: number of consecutive answers that lacked each known engine.
        urls: engines in the new answer.
    """
    kept = {url: count + 1 for url, count in misses.items() if url not in urls and count + 1 < _MAX_MISSES}
    return kept | dict.fromkeys(urls, 0)
