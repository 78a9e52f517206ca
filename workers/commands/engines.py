"""`penstock engines add` and `remove`: change the engines of a run."""

from typing import Literal

from stream.connection.run_connection import RunConnection
from stream.errors import PenstockError
from stream.operator.engine_overrides import (
    add_engine,
    apply_engine_overrides,
    read_engine_overrides,
    remove_engine,
)
from workers.commands.control import operator_name
from workers.engine_api.discovery.addresses import normalize_engine_url
from workers.runs.engines import EngineReport, configured_engines, probe_engine
from workers.runs.find import open_run, refuse_other_run
from workers.runs.run import Run
from workers.terminal.output import print_json, print_line


def change_engine(action: Literal["add", "remove"], url: str, target: str | None, redis: str, *, as_json: bool) -> None:
    """Add an engine to a run, or remove one of any origin. Workers follow the change immediately.

    Raises:
        SettingsError: the URL is invalid.
        PenstockError: there is no such run, or it is not running.
    """
    url = normalize_engine_url(url)
    run = open_run(target, redis, must_have_begun=True)
    apply_change = add_engine if action == "add" else remove_engine
    operator = operator_name()

    async def change(connection: RunConnection) -> tuple[bool, EngineReport, bool]:
        await refuse_other_run(run, connection)
        changed = await apply_change(connection, url, operator)
        report = EngineReport(url=url, source="operator", removed=action == "remove")
        if action == "add":
            await probe_engine(report)
        return changed, report, action == "remove" and await _no_engine_left(run, connection)

    changed, report, none_left = run.call(change)
    if as_json:
        result = {"url": url, "action": action, "changed": changed, "healthy": report.healthy, "error": report.error}
        print_json(result | {"none_left": none_left})
        return
    done = "added to" if action == "add" else "removed from"
    text = f"{url} {'is' if changed else 'was'} {done} run {run.name!r}{'' if changed else ' already'}"
    if action == "remove":
        text += ": it gets no new requests; running ones finish"
        if none_left:
            text += "; it was the last one: the run waits for another, and ends if none is added"
    elif report.healthy:
        text += ": it is used as soon as the trainer has sent it the current weights"
    else:
        text += f"; it does not answer from here ({report.error}) and is used once it does"
    print_line(text)


async def _no_engine_left(run: Run, connection: RunConnection) -> bool:
    """Return whether the run has no engines left, as far as this machine can resolve their names."""
    try:
        sources, unresolved = await configured_engines(run.settings, run.folder)
        left = unresolved or apply_engine_overrides(tuple(sources), await read_engine_overrides(connection))
    except PenstockError:
        return False
    return run.settings is not None and not left
