"""Finds the current engines of a run: from the settings, a DNS name, and the operator's overrides in Redis."""

from collections.abc import Sequence

import anyio
import structlog

from stream.connection.run_connection import RunConnection
from stream.operator.engine_overrides import (
    EngineOverride,
    apply_engine_overrides,
    read_engine_overrides,
    watch_engine_overrides,
)
from workers.engine_api.discovery.addresses import merge_dns_answer, normalize_engine_url, resolve_engines
from workers.settings.engine import Engine

log = structlog.get_logger()

_DNS_INTERVAL_S = 3.0
"""Seconds between two DNS queries."""


class EngineDiscovery:
    """The current engines of a run, updated while `watch` runs.

    Args:
        urls: engines from the settings.
        dns: URL whose host name resolves to one address per engine; empty: none.
        connection: connection to the server with the operator's overrides; None: there are none.

    Attributes:
        urls: base URLs without a slash at their end, without duplicates.
        changed: set at the next change of `urls`, then replaced by a new event.

    Raises:
        SettingsError: a URL is malformed.
    """

    def __init__(self, urls: Sequence[str], *, dns: str = "", connection: RunConnection | None = None) -> None:
        self._configured_urls = tuple(normalize_engine_url(url, "engine.urls") for url in urls)
        self._dns = normalize_engine_url(dns, "engine.urls") if dns else ""
        self._dns_misses: dict[str, int] = {}
        self._dns_failing = False
        self._connection = connection
        self._overrides: list[EngineOverride] = []
        self.changed = anyio.Event()
        self.urls = apply_engine_overrides(self._configured_urls, ())

    @property
    def empty_reason(self) -> str:
        """Why the run has no engine, as a message for operators."""
        if not self._configured_urls and not self._dns:
            reason = "engine.urls is empty"
        elif self._dns and not self._dns_misses:
            reason = f"{self._dns} (engine.urls) resolves to no address"
            reason += ", and the others in engine.urls were removed" if self._configured_urls else ""
        else:
            reason = "those in engine.urls were removed"
        return f"the run has no engine: {reason}; `penstock engines add` adds one"

    @classmethod
    async def from_settings(cls, engine: Engine, connection: RunConnection) -> "EngineDiscovery":
        """Read the current engines of a run.

        Raises:
            SettingsError: a URL is malformed.
        """
        discovery = cls(engine.static_urls, dns=engine.dns, connection=connection)
        if discovery._dns:
            await discovery._resolve_dns()
        discovery._set_overrides(await read_engine_overrides(connection))
        return discovery

    async def watch(self) -> None:
        """Follow DNS and the operator's overrides forever; returns at once if there are neither."""
        async with anyio.create_task_group() as tasks:
            if self._dns:
                tasks.start_soon(self._follow_dns)
            if self._connection is not None:
                tasks.start_soon(self._follow_overrides, self._connection)

    async def _follow_overrides(self, connection: RunConnection) -> None:
        async for overrides in watch_engine_overrides(connection):
            self._set_overrides(overrides)

    def _set_overrides(self, overrides: list[EngineOverride]) -> None:
        self._overrides = overrides
        self._refresh()

    async def _follow_dns(self) -> None:
        while True:
            await anyio.sleep(_DNS_INTERVAL_S)
            await self._resolve_dns()

    async def _resolve_dns(self) -> None:
        """Query the name server; while the name does not resolve, the last answer stays valid."""
        try:
            found = await resolve_engines(self._dns)
        except (OSError, UnicodeError) as error:  # UnicodeError: a label of the name is empty or too long
            if not self._dns_failing:
                self._dns_failing = True
                why = str(error) or "no answer in time"
                log.warning("engines.dns_failed", name=self._dns, why=why, known=len(self._dns_misses))
            return
        if self._dns_failing:
            self._dns_failing = False
            log.info("engines.dns_recovered", name=self._dns, engines=len(found))
        self._dns_misses = merge_dns_answer(self._dns_misses, found)
        self._refresh()

    def _refresh(self) -> None:
        urls = apply_engine_overrides((*self._configured_urls, *self._dns_misses), self._overrides)
        added, removed = sorted(set(urls) - set(self.urls)), sorted(set(self.urls) - set(urls))
        self.urls = urls
        if added or removed:
            log.info("engines.changed", added=added, removed=removed)
            changed, self.changed = self.changed, anyio.Event()
            changed.set()
