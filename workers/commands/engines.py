"""`penstock engines`: list the engines of a run, and ask each whether it answers."""

from typing import Literal

import anyio
import anyio.to_thread
from msgspec import Struct
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stream.errors import EngineError, SettingsError
from workers.engine_api.connection import ConnectionPool
from workers.engine_api.discovery.addresses import explain_lookup, find_engines
from workers.engine_api.queries import check_health, fetch_weight_name
from workers.engine_api.wire import policy_version
from workers.run.run_info import RunLocation, find_run, read_run_info
from workers.settings.engine import DNS_PREFIX, FILE_PREFIX
from workers.terminal.output import print_json

_PROBE_TIMEOUT_S = 3.0

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


def list_engines(target: str | None, *, as_json: bool = False) -> None:
    """Print the engines of a run and whether each answers.

    Raises:
        PenstockError: there is no such run.
    """
    reports = anyio.run(read_engine_reports, find_run(target, must_have_begun=False))
    if as_json:
        print_json(reports)
        return
    console = Console(highlight=False)
    nothing = "no engines: engine.urls is empty, and no engine of `penstock run` is running"
    console.print(_table(reports) if reports else nothing)


async def read_engine_reports(location: RunLocation) -> list[EngineReport]:
    """Query every engine. A DNS name that does not resolve, or an unreadable file, has its own entry."""
    if location.settings is None:
        return []
    running = await anyio.to_thread.run_sync(read_run_info, location.folder) if location.folder else None
    entries = dict.fromkeys((*location.settings.engine.urls, *(running.engines if running else ())))
    reports: dict[str, EngineReport] = {}
    for entry in entries:
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
            report.policy_version = policy_version(await fetch_weight_name(connections, report.url, _PROBE_TIMEOUT_S))
        except EngineError as error:  # a healthy engine need not name its weights
            report.error = "" if report.healthy else str(error)


def _table(reports: list[EngineReport]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    for heading in ("engine", "named by", "weights", ""):
        table.add_column(heading)
    for report in reports:
        state = Text("healthy", "green") if report.healthy else Text(f"does not answer: {report.error}", "red")
        version = "-" if report.policy_version is None else f"v{report.policy_version}"
        table.add_row(report.url, report.source, version, state)
    return table
