"""`penstock engines`: which engines a run has, and an operator's word on them."""

from datetime import UTC, datetime
from functools import partial
from http.client import HTTPException
from typing import Any, Literal
from urllib.request import ProxyHandler, build_opener

import anyio
import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stream.connection.run_connection import RunConnection
from stream.errors import PenstockError
from stream.operator.engine_overrides import (
    EngineOverride,
    add_engine,
    apply_engine_overrides,
    read_engine_overrides,
    remove_engine,
)
from workers.commands.control import operator_name
from workers.engine_api.discovery.addresses import normalize_engine_url, resolve_engines
from workers.engine_api.wire import WeightInfo, policy_version
from workers.run import run_info as live
from workers.run.run_info import RunLocation, find_run, with_run
from workers.settings.engine import DNS_PREFIX

_PROBE_TIMEOUT_S = 3.0
_OPENER = build_opener(ProxyHandler({}))
"""Workers ask engines without a proxy, too."""


Source = Literal["settings", "dns", "list"]


class EngineReport(Struct, kw_only=True):
    """One engine, as `--json` says it; keys are only ever added."""

    url: str
    source: Source
    """Who names it: the settings (or `penstock run`, which started it), a DNS name in them, the operator's list."""
    removed: bool
    """By an operator: it is asked for nothing, whoever names it."""
    changed_by: str = ""
    """Who had the last word on it; empty where nobody had one."""
    changed_at: float | None = None
    """When that was: Unix time in seconds, by the Redis server's clock."""
    reachable: bool = False
    """To this machine."""
    error: str = ""
    """It does not, if so."""
    policy_version: int | None = None
    """Policy version of its weights; None where it has none, or does not answer."""


def list_engines(target: str | None, redis: str, *, as_json: bool = False) -> None:
    """Print the engines of a run, and whether each answers.

    Raises:
        PenstockError: no such run.
    """
    place = find_run(target, redis)

    async def main(connection: RunConnection) -> list[EngineReport]:
        return await _engine_reports(place, await read_engine_overrides(connection))

    found = with_run(place, main)
    if as_json:
        _print_json(found)
        return
    console = Console(highlight=False)
    if not found:
        console.print("no engines: neither the settings nor `penstock engines add` name one")
        return
    console.print(_table(found))


def change_engine(action: Literal["add", "remove"], url: str, target: str | None, redis: str, *, as_json: bool) -> None:
    """Add an engine to a run, or remove one, whoever named it; workers hear of it at once.

    Raises:
        SettingsError: the URL is none.
        PenstockError: no such run, or it does not go on.
    """
    url = normalize_engine_url(url)
    place = find_run(target, redis)
    apply_change = add_engine if action == "add" else remove_engine
    by = operator_name()

    async def main(connection: RunConnection) -> tuple[bool, EngineReport, bool]:
        changed = await apply_change(connection, url, by)
        report = EngineReport(url=url, source="list", removed=action == "remove")
        if action == "add":
            await _probe(report)
        return changed, report, action == "remove" and await _no_engine_left(place, connection)

    changed, report, none_left = with_run(place, main)
    if as_json:
        said = {"url": url, "word": action, "changed": changed, "answers": report.reachable, "why": report.error}
        _print_json(said | {"none_left": none_left})
        return
    done = "added to" if action == "add" else "removed from"
    told = f"{url} {'is' if changed else 'was'} {done} run {place.run!r}{'' if changed else ' already'}"
    if action == "remove":
        told += ": it gets nothing new to do, and what it works on is finished"
        if none_left:
            told += "; it was the last one: the run waits for another, and ends if none is added"
    elif report.reachable:
        told += ": it is used as soon as the trainer has given it the current weights"
    else:
        told += f", although it does not answer from here ({report.error}): it is used once it does"
    print(told, flush=True)  # noqa: T201  (this is the command's output)


async def _engine_reports(place: RunLocation, overrides: list[EngineOverride]) -> list[EngineReport]:
    """Every engine that anybody names, the removed ones included; a name that does not resolve stands for its own."""
    last = {word.url: word for word in overrides}
    sources, unresolved = await _configured_engines(place)
    kept = apply_engine_overrides(tuple(sources), overrides)
    reports = []
    for url in dict.fromkeys((*sources, *last)):
        word = last.get(url)
        report = EngineReport(url=url, source=sources.get(url, "list"), removed=url not in kept)
        if word is not None:
            report.changed_by, report.changed_at = word.set_by, word.set_at
        reports.append(report)
    async with anyio.create_task_group() as tasks:
        for report in reports:
            tasks.start_soon(_probe, report)
    return [*reports, *unresolved]


async def _no_engine_left(place: RunLocation, connection: RunConnection) -> bool:
    """Whether the run has no engine any more, as far as can be seen from here."""
    try:
        sources, unresolved = await _configured_engines(place)
        left = unresolved or apply_engine_overrides(tuple(sources), await read_engine_overrides(connection))
    except PenstockError:
        return False
    return place.settings is not None and not left


async def _configured_engines(place: RunLocation) -> tuple[dict[str, Source], list[EngineReport]]:
    """The engines that the settings name, and those that `penstock run` started; and a name that does not resolve."""
    found: dict[str, Source] = {}
    if place.settings is None:
        return found, []
    running = await anyio.to_thread.run_sync(live.read_run_info, place.folder) if place.folder else None
    for url in (*place.settings.engine.urls, *(running.engines if running else ())):
        if not url.startswith(DNS_PREFIX):
            found[normalize_engine_url(url, "engine.urls")] = "settings"
    if not place.settings.engine.dns:
        return found, []
    name = normalize_engine_url(place.settings.engine.dns, "engine.urls")
    try:
        at_name = await resolve_engines(name)
    except (OSError, UnicodeError) as error:  # it may resolve for the workers, elsewhere
        why = f"the name does not resolve here: {error or 'no answer in time'}"
        return found, [EngineReport(url=name, source="dns", removed=False, error=why)]
    for url in at_name:
        found.setdefault(url, "dns")
    return found, []


async def _probe(report: EngineReport) -> None:
    """Note whether it answers, and with which weights."""
    try:
        await anyio.to_thread.run_sync(partial(_get, f"{report.url}/health"))
        report.reachable = True
        told = await anyio.to_thread.run_sync(partial(_get, f"{report.url}/weight_info"))
        report.policy_version = policy_version(msgspec.json.decode(told, type=WeightInfo).weight_version)
    except (OSError, HTTPException) as error:
        report.error = "" if report.reachable else str(error) or type(error).__name__
    except msgspec.DecodeError:
        report.policy_version = None


def _get(url: str) -> bytes:
    with _OPENER.open(url, timeout=_PROBE_TIMEOUT_S) as answer:  # `normalize_engine_url` lets http and https pass alone
        return bytes(answer.read(1_000_000))


def _table(found: list[EngineReport]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    for heading in ("engine", "named by", "weights", ""):
        table.add_column(heading)
    for report in found:
        if report.removed:
            state = Text(f"removed by {report.changed_by} at {_format_time(report.changed_at)}", "yellow")
        elif report.reachable:
            state = Text("answers", "green")
        else:
            state = Text(f"does not answer: {report.error}", "red")
        version = "-" if report.policy_version is None else f"v{report.policy_version}"
        table.add_row(report.url, report.changed_by if report.source == "list" else report.source, version, state)
    return table


def _format_time(at: float | None) -> str:
    return f"{datetime.fromtimestamp(at or 0.0, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _print_json(what: Any) -> None:
    print(msgspec.json.encode(what).decode(), flush=True)  # noqa: T201  (this is the command's output)
