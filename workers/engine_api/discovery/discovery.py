"""Finds the current engines of a run: those that the settings name, those behind a DNS name, and those in a file."""

from collections.abc import Sequence
from typing import Final, Self

import anyio
import structlog

from stream.errors import SettingsError
from workers.engine_api.discovery.addresses import (
    explain_lookup,
    find_engines,
    merge_dns_answer,
    normalize_engine_url,
)
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
