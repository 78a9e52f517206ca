"""The engines of a run: who named them, whether each answers this machine, and with which weights."""

from pathlib import Path
from typing import Final, Literal

import anyio
import anyio.to_thread
from msgspec import Struct

from stream.errors import EngineError, SettingsError
from workers.engine_api.connection_pool import ConnectionPool
from workers.engine_api.discovery import explain_lookup, find_engines
from workers.engine_api.engine_queries import check_health, fetch_weight_info
from workers.engine_api.wire import policy_version
from workers.runs.live_run import read_live
from workers.settings import Settings
from workers.settings.training import DNS_PREFIX, FILE_PREFIX

_PROBE_TIMEOUT_S: Final = 3.0

Source = Literal["settings", "dns", "file"]


class EngineReport(Struct, kw_only=True):
    """One engine, in the form of `--json`."""

    url: str
    source: Source
    """Origin of the URL: the settings (or `penstock run`, which started it), or a DNS name or a file in them."""
    healthy: bool = False
    """Whether the engine answers this machine."""
    error: str = ""
    """Why the engine does not answer; empty: it does."""
    policy_version: int | None = None
    """Policy version of the engine's weights; None if it has none or does not answer."""
    cache_bytes: int | None = None
    """Memory that its keys and values take; None if it does not say, as vLLM."""
    max_cache_bytes: int | None = None
    """The most that they may take; likewise."""


async def read_engine_reports(settings: Settings | None, folder: Path | None) -> list[EngineReport]:
    """Query every engine. A DNS name that does not resolve, or an unreadable file, has its own entry.

    Args:
        settings: of the run; None: nothing is known of its engines.
        folder: of the run, which names the engines that `penstock run` started.
    """
    if settings is None:
        return []
    running = await anyio.to_thread.run_sync(read_live, folder) if folder else None
    reports: dict[str, EngineReport] = {}
    for entry in dict.fromkeys((*settings.engine.urls, *(running.engines if running else ()))):
        source = _source(entry)
        try:
            for url in await find_engines(entry):
                reports.setdefault(url, EngineReport(url=url, source=source))
        except (OSError, UnicodeError, SettingsError) as error:  # the workers' machines may know it
            problem = f"cannot be looked up here: {explain_lookup(error)}"
            reports[entry] = EngineReport(url=entry, source=source, error=problem)
    async with anyio.create_task_group() as tasks:
        for report in reports.values():
            if not report.error:
                tasks.start_soon(_probe, report)
    return list(reports.values())


def _source(entry: str) -> Source:
    if entry.startswith(DNS_PREFIX):
        return "dns"
    return "file" if entry.startswith(FILE_PREFIX) else "settings"


async def _probe(report: EngineReport) -> None:
    """Query the engine, and fill in its health and policy version."""
    async with ConnectionPool(keep_alive=False) as connections:
        try:
            await check_health(connections, report.url, _PROBE_TIMEOUT_S)
            report.healthy = True
            info = await fetch_weight_info(connections, report.url, _PROBE_TIMEOUT_S)
            report.policy_version = policy_version(info.weight_version)
            if info.cache is not None:
                report.cache_bytes, report.max_cache_bytes = info.cache.bytes, info.cache.max_bytes
        except EngineError as error:  # a healthy engine need not name its weights
            report.error = "" if report.healthy else str(error)
