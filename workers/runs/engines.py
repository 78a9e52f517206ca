"""The engines of a run: who named them, whether each answers this machine, and with which weights."""

from pathlib import Path
from typing import Final, Literal

import anyio
import anyio.to_thread
from msgspec import Struct

from stream.connection.run_connection import RunConnection
from stream.errors import EngineError
from stream.operator.engine_overrides import apply_engine_overrides, read_engine_overrides
from workers.engine_api.connection import ConnectionPool
from workers.engine_api.discovery.addresses import normalize_engine_url, resolve_engines
from workers.engine_api.queries import check_health, fetch_weight_name
from workers.engine_api.wire import policy_version
from workers.runs.live_run import read_live
from workers.settings import Settings
from workers.settings.engine import DNS_PREFIX

_PROBE_TIMEOUT_S: Final = 3.0

Source = Literal["settings", "dns", "operator"]


class EngineReport(Struct, kw_only=True):
    """One engine, in the form of `--json`."""

    url: str
    source: Source
    """Origin of the URL: the settings (or `penstock run`, which started it), a DNS name in them, or an operator."""
    removed: bool
    """Whether an operator removed the engine; then it gets no requests, even if the settings name it."""
    changed_by: str = ""
    """Last operator who added or removed the engine; empty: none."""
    changed_at: float | None = None
    """Unix time of that change in seconds, by the Redis server's clock."""
    healthy: bool = False
    """Whether the engine answers this machine."""
    error: str = ""
    """Why the engine does not answer; empty: it does."""
    policy_version: int | None = None
    """Policy version of the engine's weights; None if it has none or does not answer."""


async def read_engine_reports(
    settings: Settings | None, folder: Path | None, connection: RunConnection
) -> list[EngineReport]:
    """Query every known engine, removed ones included. A DNS name that does not resolve has its own entry.

    Args:
        settings: of the run; None: only what operators named is known.
        folder: of the run, which names the engines that `penstock run` started.
        connection: to the run's server.
    """
    overrides = await read_engine_overrides(connection)
    last_override = {override.url: override for override in overrides}
    sources, unresolved = await configured_engines(settings, folder)
    in_use = apply_engine_overrides(tuple(sources), overrides)
    reports = []
    for url in dict.fromkeys((*sources, *last_override)):
        override = last_override.get(url)
        report = EngineReport(url=url, source=sources.get(url, "operator"), removed=url not in in_use)
        if override is not None:
            report.changed_by, report.changed_at = override.set_by, override.set_at
        reports.append(report)
    async with anyio.create_task_group() as tasks:
        for report in reports:
            tasks.start_soon(probe_engine, report)
    return [*reports, *unresolved]


async def configured_engines(
    settings: Settings | None, folder: Path | None
) -> tuple[dict[str, Source], list[EngineReport]]:
    """Return the engines from the settings and from `penstock run`, and the DNS name if it does not resolve."""
    sources: dict[str, Source] = {}
    if settings is None:
        return sources, []
    engine = settings.engine
    running = await anyio.to_thread.run_sync(read_live, folder) if folder else None
    for url in (*engine.urls, *(running.engines if running else ())):
        if not url.startswith(DNS_PREFIX):
            sources[normalize_engine_url(url, "engine.urls")] = "settings"
    if not engine.dns:
        return sources, []
    name = normalize_engine_url(engine.dns, "engine.urls")
    try:
        resolved = await resolve_engines(name)
    except (OSError, UnicodeError) as error:  # the name may resolve on the workers' machines
        problem = f"the name does not resolve here: {error or 'no answer in time'}"
        return sources, [EngineReport(url=name, source="dns", removed=False, error=problem)]
    for url in resolved:
        sources.setdefault(url, "dns")
    return sources, []


async def probe_engine(report: EngineReport) -> None:
    """Query the engine, and fill in its health and policy version."""
    async with ConnectionPool(keep_alive=False) as connections:
        try:
            await check_health(connections, report.url, _PROBE_TIMEOUT_S)
            report.healthy = True
            report.policy_version = policy_version(await fetch_weight_name(connections, report.url, _PROBE_TIMEOUT_S))
        except EngineError as error:  # a healthy engine need not name its weights
            report.error = "" if report.healthy else str(error)
