"""`penstock inflight`: show what each completion of a run is doing now, and for how long. Read-only."""

from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stream.operator.in_flight import OngoingActivity, groups_in_flight, ongoing_activities
from stream.operator.run_status import RunStatus
from workers.run.run_info import find_run, read_run_status
from workers.runs.transcript import escape_controls
from workers.terminal.output import make_console, print_json
from workers.terminal.progress import format_duration


def show_in_flight(target: str | None, redis: str, *, count: int, stuck_s: float, as_json: bool = False) -> None:
    """Print what the completions of a run are doing, the longest unchanged first.

    Args:
        target: folder, settings file or name of the run.
        redis: URL of its server, if its folder does not name it.
        count: how many lines.
        stuck_s: seconds after which an activity is marked.
        as_json: print one JSON object with all groups.
    """
    location = find_run(target, redis)
    status = read_run_status(location)
    if as_json:
        print_json(in_flight_report(location.run, status, stuck_s))
        return
    make_console().print(render_in_flight(status, count, stuck_s))


def in_flight_report(run: str, status: RunStatus, stuck_s: float) -> dict[str, Any]:
    """Return what `--json` prints."""
    groups = groups_in_flight(status)
    now = status.now_ms / 1000
    return {
        "run": run,
        "at": now,
        "snapshot": status.snapshot,
        "stuck": sum(now - each.since > stuck_s for each in ongoing_activities(groups)),
        "groups": [_group_as_json(msgspec.to_builtins(group)) for group in groups],
    }


def _group_as_json(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group with its completions as objects, which are arrays in the record."""
    names = ("index", "turn", "activity", "detail", "since", "engine", "versions")
    return group | {"completions": [dict(zip(names, each, strict=True)) for each in group.get("completions", [])]}


def render_in_flight(status: RunStatus, count: int, stuck_s: float) -> RenderableType:
    """Return what completions are doing as a terminal table, and a line about those that seem stuck."""
    activities = ongoing_activities(groups_in_flight(status))
    now = status.now_ms / 1000
    stuck = sum(now - each.since > stuck_s for each in activities)
    lines: list[RenderableType] = [_activity_table(activities[:count], now, stuck_s)] if activities else []
    total = f"{len(activities):,} in flight"
    if len(activities) > count:
        total += f", the {count:,} longest unchanged are shown"
    summary = Text(total, "bright_black")
    if stuck:
        summary.append("; ").append(f"{stuck:,} unchanged for over {format_duration(stuck_s)}", "bold yellow")
    return Group(*lines, summary)


def _activity_table(activities: Sequence[OngoingActivity], now: float, stuck_s: float) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    table.add_column("for", justify="right", no_wrap=True)
    table.add_column("activity", no_wrap=True, overflow="ellipsis", min_width=12)
    table.add_column("completion", no_wrap=True, overflow="ellipsis", min_width=10)
    table.add_column("turn", justify="right", no_wrap=True)
    for heading in ("versions", "environment", "engine", "worker"):
        table.add_column(heading, no_wrap=True, overflow="ellipsis")
    for each in activities:
        seconds, group, completion = now - each.since, each.group, each.completion
        is_stuck = seconds > stuck_s
        name = f"{group.prompt} #{completion.index}" if completion else f"{group.prompt} (group)"
        table.add_row(
            Text(format_duration(max(0.0, seconds)), "bold yellow" if is_stuck else ""),
            Text(escape_controls(each.text), "yellow" if is_stuck else "cyan"),
            escape_controls(name),
            str(completion.turn + 1) if completion else "",
            _format_versions(completion.versions) if completion else "",
            escape_controls(group.environment),
            escape_controls(completion.engine.removeprefix("http://")) if completion else "",
            escape_controls(group.worker),
        )
    return table


def _format_versions(versions: Sequence[int]) -> str:
    """Return `7`, `7-9`, or nothing before the first turn."""
    return "-".join(str(version) for version in sorted({*versions[:1], *versions[-1:]}))
