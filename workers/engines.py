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

from stream.engines import EngineWord, add_engine, engine_words, engines_now, remove_engine
from stream.errors import PenstockError
from stream.link import Link
from workers.engine.wire import WeightInfo, policy_version
from workers.fleet.addresses import engine_url, engines_at
from workers.run import live
from workers.run.live import Place, locate, visit
from workers.steering import whoever_asks

_ANSWER_S = 3.0
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
    by: str = ""
    """Who had the last word on it; empty where nobody had one."""
    at: float | None = None
    """When that was: Unix time in seconds, by the Redis server's clock."""
    answers: bool = False
    """To this machine."""
    why: str = ""
    """It does not, if so."""
    version: int | None = None
    """Policy version of its weights; None where it has none, or does not answer."""


def list_engines(target: str | None, redis: str, *, as_json: bool = False) -> None:
    """Print the engines of a run, and whether each answers.

    Raises:
        PenstockError: no such run.
    """
    place = locate(target, redis)

    async def main(link: Link) -> list[EngineReport]:
        return await _look(place, await engine_words(link))

    found = visit(place, main)
    if as_json:
        _print_json(found)
        return
    console = Console(highlight=False)
    if not found:
        console.print("no engines: neither the settings nor `penstock engines add` name one")
        return
    console.print(_table(found))


def say_of_engine(word: Literal["add", "remove"], url: str, target: str | None, redis: str, *, as_json: bool) -> None:
    """Add an engine to a run, or remove one, whoever named it; workers hear of it at once.

    Raises:
        SettingsError: the URL is none.
        PenstockError: no such run, or it does not go on.
    """
    url = engine_url(url)
    place = locate(target, redis)
    say = add_engine if word == "add" else remove_engine
    by = whoever_asks()

    async def main(link: Link) -> tuple[bool, EngineReport, bool]:
        changed = await say(link, url, by)
        report = EngineReport(url=url, source="list", removed=word == "remove")
        if word == "add":
            await _ask(report)
        return changed, report, word == "remove" and await _none_left(place, link)

    changed, report, none_left = visit(place, main)
    if as_json:
        said = {"url": url, "word": word, "changed": changed, "answers": report.answers, "why": report.why}
        _print_json(said | {"none_left": none_left})
        return
    done = "added to" if word == "add" else "removed from"
    told = f"{url} {'is' if changed else 'was'} {done} run {place.run!r}{'' if changed else ' already'}"
    if word == "remove":
        told += ": it gets nothing new to do, and what it works on is finished"
        if none_left:
            told += "; it was the last one: the run waits for another, and ends if none is added"
    elif report.answers:
        told += ": it is used as soon as the trainer has given it the current weights"
    else:
        told += f", although it does not answer from here ({report.why}): it is used once it does"
    print(told, flush=True)  # noqa: T201  (this is the command's output)


async def _look(place: Place, words: list[EngineWord]) -> list[EngineReport]:
    """Every engine that anybody names, the removed ones included; a name that does not resolve stands for its own."""
    last = {word.url: word for word in words}
    sources, unresolved = await _named(place)
    kept = engines_now(tuple(sources), words)
    reports = []
    for url in dict.fromkeys((*sources, *last)):
        word = last.get(url)
        report = EngineReport(url=url, source=sources.get(url, "list"), removed=url not in kept)
        if word is not None:
            report.by, report.at = word.by, word.at
        reports.append(report)
    async with anyio.create_task_group() as tasks:
        for report in reports:
            tasks.start_soon(_ask, report)
    return [*reports, *unresolved]


async def _none_left(place: Place, link: Link) -> bool:
    """Whether the run has no engine any more, as far as can be seen from here."""
    try:
        sources, unresolved = await _named(place)
        left = unresolved or engines_now(tuple(sources), await engine_words(link))
    except PenstockError:
        return False
    return place.settings is not None and not left


async def _named(place: Place) -> tuple[dict[str, Source], list[EngineReport]]:
    """The engines that the settings name, and those that `penstock run` started; and a name that does not resolve."""
    found: dict[str, Source] = {}
    if place.settings is None:
        return found, []
    running = await anyio.to_thread.run_sync(live.read, place.folder) if place.folder else None
    for url in (*place.settings.engine.urls, *(running.engines if running else ())):
        found[engine_url(url, "engine.urls")] = "settings"
    if not place.settings.engine.dns:
        return found, []
    name = engine_url(place.settings.engine.dns, "engine.dns")
    try:
        at_name = await engines_at(name)
    except (OSError, UnicodeError) as error:  # it may resolve for the workers, elsewhere
        why = f"the name does not resolve here: {error or 'no answer in time'}"
        return found, [EngineReport(url=name, source="dns", removed=False, why=why)]
    for url in at_name:
        found.setdefault(url, "dns")
    return found, []


async def _ask(report: EngineReport) -> None:
    """Note whether it answers, and with which weights."""
    try:
        await anyio.to_thread.run_sync(partial(_get, f"{report.url}/health"))
        report.answers = True
        told = await anyio.to_thread.run_sync(partial(_get, f"{report.url}/weight_info"))
        report.version = policy_version(msgspec.json.decode(told, type=WeightInfo).weight_version)
    except (OSError, HTTPException) as error:
        report.why = "" if report.answers else str(error) or type(error).__name__
    except msgspec.DecodeError:
        report.version = None


def _get(url: str) -> bytes:
    with _OPENER.open(url, timeout=_ANSWER_S) as answer:  # `engine_url` lets http and https pass alone
        return bytes(answer.read(1_000_000))


def _table(found: list[EngineReport]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    for heading in ("engine", "named by", "weights", ""):
        table.add_column(heading)
    for report in found:
        if report.removed:
            state = Text(f"removed by {report.by} at {_day(report.at)}", "yellow")
        elif report.answers:
            state = Text("answers", "green")
        else:
            state = Text(f"does not answer: {report.why}", "red")
        version = "-" if report.version is None else f"v{report.version}"
        table.add_row(report.url, report.by if report.source == "list" else report.source, version, state)
    return table


def _day(at: float | None) -> str:
    return f"{datetime.fromtimestamp(at or 0.0, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _print_json(what: Any) -> None:
    print(msgspec.json.encode(what).decode(), flush=True)  # noqa: T201  (this is the command's output)
