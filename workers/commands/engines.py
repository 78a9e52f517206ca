"""`penstock engines`: list the engines of a run, add one, or remove one."""

from datetime import UTC, datetime
from typing import Literal

import anyio
from msgspec import Struct
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stream.connection.run_connection import RunConnection
from stream.errors import EngineError, PenstockError
from stream.operator.engine_overrides import (
    EngineOverride,
    add_engine,
    apply_engine_overrides,
    read_engine_overrides,
    remove_engine,
)
from workers.commands.control import operator_name
from workers.commands.output import print_json, print_line
from workers.engine_api.connection import ConnectionPool
from workers.engine_api.discovery.addresses import normalize_engine_url, resolve_engines
from workers.engine_api.queries import check_health, fetch_weight_name
from workers.engine_api.wire import policy_version
from workers.run.run_info import RunLocation, find_run, read_run_info, refuse_other_run, with_run
from workers.settings.engine import DNS_PREFIX

_PROBE_TIMEOUT_S = 3.0

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


def list_engines(target: str | None, redis: str, *, as_json: bool = False) -> None:
    """Print the engines of a run and whether each answers.

    Raises:
        PenstockError: there is no such run.
    """
    location = find_run(target, redis)

    async def report(connection: RunConnection) -> list[EngineReport]:
        return await read_engine_reports(location, await read_engine_overrides(connection))

    reports = with_run(location, report)
    if as_json:
        print_json(reports)
        return
    console = Console(highlight=False)
    if reports:
        console.print(_table(reports))
    else:
        console.print("no engines: neither the settings nor `penstock engines add` name one")


def change_engine(action: Literal["add", "remove"], url: str, target: str | None, redis: str, *, as_json: bool) -> None:
    """Add an engine to a run, or remove one of any origin. Workers follow the change immediately.

    Raises:
        SettingsError: the URL is invalid.
        PenstockError: there is no such run, or it is not running.
    """
    url = normalize_engine_url(url)
    location = find_run(target, redis)
    apply_change = add_engine if action == "add" else remove_engine
    operator = operator_name()

    async def change(connection: RunConnection) -> tuple[bool, EngineReport, bool]:
        await refuse_other_run(location, connection)
        changed = await apply_change(connection, url, operator)
        report = EngineReport(url=url, source="operator", removed=action == "remove")
        if action == "add":
            await _probe(report)
        return changed, report, action == "remove" and await _no_engine_left(location, connection)

    changed, report, none_left = with_run(location, change)
    if as_json:
        result = {"url": url, "action": action, "changed": changed, "healthy": report.healthy, "error": report.error}
        print_json(result | {"none_left": none_left})
        return
    done = "added to" if action == "add" else "removed from"
    text = f"{url} {'is' if changed else 'was'} {done} run {location.run!r}{'' if changed else ' already'}"
    if action == "remove":
        text += ": it gets no new requests; running ones finish"
        if none_left:
            text += "; it was the last one: the run waits for another, and ends if none is added"
    elif report.healthy:
        text += ": it is used as soon as the trainer has sent it the current weights"
    else:
        text += f"; it does not answer from here ({report.error}) and is used once it does"
    print_line(text)


async def read_engine_reports(location: RunLocation, overrides: list[EngineOverride]) -> list[EngineReport]:
    """Query every known engine, removed ones included. A DNS name that does not resolve has its own entry."""
    last_override = {override.url: override for override in overrides}
    sources, unresolved = await _configured_engines(location)
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
            tasks.start_soon(_probe, report)
    return [*reports, *unresolved]


async def _no_engine_left(location: RunLocation, connection: RunConnection) -> bool:
    """Return whether the run has no engines left, as far as this machine can resolve their names."""
    try:
        sources, unresolved = await _configured_engines(location)
        left = unresolved or apply_engine_overrides(tuple(sources), await read_engine_overrides(connection))
    except PenstockError:
        return False
    return location.settings is not None and not left


async def _configured_engines(location: RunLocation) -> tuple[dict[str, Source], list[EngineReport]]:
    """Return the engines from the settings and from `penstock run`, and the DNS name if it does not resolve."""
    found: dict[str, Source] = {}
    if location.settings is None:
        return found, []
    engine = location.settings.engine
    running = await anyio.to_thread.run_sync(read_run_info, location.folder) if location.folder else None
    for url in (*engine.urls, *(running.engines if running else ())):
        if not url.startswith(DNS_PREFIX):
            found[normalize_engine_url(url, "engine.urls")] = "settings"
    if not engine.dns:
        return found, []
    name = normalize_engine_url(engine.dns, "engine.urls")
    try:
        resolved = await resolve_engines(name)
    except (OSError, UnicodeError) as error:  # the name may resolve on the workers' machines
        problem = f"the name does not resolve here: {error or 'no answer in time'}"
        return found, [EngineReport(url=name, source="dns", removed=False, error=problem)]
    for url in resolved:
        found.setdefault(url, "dns")
    return found, []


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
        if report.removed:
            state = Text(f"removed by {report.changed_by} at {_format_time(report.changed_at)}", "yellow")
        elif report.healthy:
            state = Text("healthy", "green")
        else:
            state = Text(f"does not answer: {report.error}", "red")
        version = "-" if report.policy_version is None else f"v{report.policy_version}"
        named_by = report.changed_by if report.source == "operator" else report.source
        table.add_row(report.url, named_by, version, state)
    return table


def _format_time(at: float | None) -> str:
    return f"{datetime.fromtimestamp(at or 0.0, UTC):%Y-%m-%d %H:%M:%S} UTC"
