"""`penstock queues`: where a run's prompts are, and what its completions are doing; once, or live. Read-only."""

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from stream.errors import NoRunError, PenstockError, SettingsError
from stream.operator.bottleneck import Bottleneck
from stream.operator.memory import ProcessMemory
from stream.operator.status import RunStatus, read_status
from stream.wording import escape_controls, format_bytes, format_counts, format_duration
from workers.runs.find import open_run
from workers.runs.folder import disk_problems
from workers.runs.run import Run
from workers.runs.status import Activity, QueueReport, activities, count_stuck, in_flight_report, queue_report
from workers.runs.summary import has_finished
from workers.terminal.output import make_console, print_json
from workers.terminal.progress import evaluation_lines, prompt_counts_text, stage_table

if TYPE_CHECKING:  # a command that reads one status does not load a Redis client
    from stream.connection.run_connection import RunConnection

_WATCH_INTERVAL_S: Final = 1.0
_START_TIMEOUT_S: Final = 600.0
"""Time to wait for a run that is about to start."""
_QUIET: Final = "bright_black"


def show_queues(run: Run, *, as_json: bool = False) -> None:
    """Print the number of prompts in each stage of a run.

    Raises:
        PenstockError: its server does not answer.
    """
    report = run.status()
    if as_json:
        print_json(report)
    else:
        make_console().print(render_queues(report))


def show_in_flight(run: Run, *, count: int, stuck_s: float, as_json: bool = False) -> None:
    """Print what the completions of a run are doing, the longest unchanged first.

    Args:
        run: the run.
        count: how many lines.
        stuck_s: seconds after which an activity is marked.
        as_json: print one JSON object with all groups.
    """
    status = run.read_status()
    if as_json:
        print_json(in_flight_report(run.name, status, stuck_s))
    else:
        make_console().print(render_in_flight(activities(status), count, stuck_s))


def watch(target: str | None, redis: str, *, in_flight: bool, stuck_s: float, as_json: bool = False) -> None:
    """Show a run on the whole terminal, from when it runs until it has finished, or Ctrl-C is pressed.

    Without a terminal one JSON object per second is printed.

    Args:
        target: folder, settings file or name of the run, which may be about to start.
        redis: URL of its server, if its folder does not name it.
        in_flight: JSON lines are about what is in flight, not about queues; a screen shows both.
        stuck_s: seconds after which an activity is marked.
        as_json: print JSON lines on a terminal, too.
    """
    with suppress(KeyboardInterrupt):  # how a watch ends, while it waits for the run, too
        run = _wait_for_run(target, redis)
        if as_json or not sys.stdout.isatty():
            run.call(partial(_print_lines, run, in_flight, stuck_s))
        else:
            run.call(partial(_show_screen, run, stuck_s))


class WatchScreen:
    """One status on the whole terminal: the queues, and as many activities as there are lines left.

    It is laid out anew at each drawing, so it fits after the terminal was resized.

    Args:
        report: the queues.
        shown: what is in flight, the longest unchanged first.
        stuck_s: seconds after which an activity is marked.
    """

    def __init__(self, report: QueueReport, shown: Sequence[Activity], stuck_s: float) -> None:
        self._report, self._shown, self._stuck_s = report, shown, stuck_s

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        queues = Group(render_queues(self._report), Text())
        used = len(console.render_lines(queues, options.update(height=None), pad=False))
        room = options.max_height - used - 2  # the table's heading, and the line below it
        yield queues
        if room > 0:
            yield render_in_flight(self._shown, room, self._stuck_s)


async def first_status(connection: "RunConnection") -> RunStatus:
    """Return the status of a run as soon as its server has one: the run may be about to start.

    Raises:
        NoRunError: it has not started in time.
    """
    deadline, after, has_told = time.monotonic() + _START_TIMEOUT_S, "0-0", False
    while True:
        try:
            return await read_status(connection, with_in_flight=True)
        except NoRunError as error:
            if time.monotonic() > deadline:
                raise
            if not has_told:
                _tell_waiting(error)
                has_told = True
        after = await connection.wait_for_change(after, _WATCH_INTERVAL_S)


def _tell_waiting(missing: PenstockError) -> None:
    print(f"{missing}; waiting for it to start, Ctrl-C ends this", file=sys.stderr, flush=True)  # noqa: T201


def _wait_for_run(target: str | None, redis: str) -> Run:
    """Return a run as soon as it runs; one that has finished at once.

    Raises:
        SettingsError: `target` is a settings file with an error.
        PenstockError: no run has started in time.
    """
    has_told, deadline = False, time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            run = open_run(target, redis, must_have_begun=True)
            if run.url or has_finished(run.file()):
                return run
            missing = PenstockError(f"the run in {run.folder} does not run")
        except SettingsError:
            raise
        except PenstockError as error:
            missing = error
        if time.monotonic() > deadline:
            raise missing
        if not has_told:
            _tell_waiting(missing)
            has_told = True
        time.sleep(_WATCH_INTERVAL_S)


async def _show_screen(run: Run, stuck_s: float, connection: "RunConnection") -> None:
    from rich.live import Live

    console = make_console()
    status = await first_status(connection)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            report = await _report(run, status)
            live.update(WatchScreen(report, activities(status), stuck_s), refresh=True)
            if report.finished:
                break
            status = await _next_status(connection)
    console.print(render_queues(report))


async def _print_lines(run: Run, in_flight: bool, stuck_s: float, connection: "RunConnection") -> None:
    status = await first_status(connection)
    while True:
        line: Any = in_flight_report(run.name, status, stuck_s) if in_flight else await _report(run, status)
        print_json(line)
        if status.meta.get("finished"):
            return
        status = await _next_status(connection)


async def _report(run: Run, status: RunStatus) -> QueueReport:
    import anyio.to_thread

    disk = await anyio.to_thread.run_sync(disk_problems, run.folder, status)
    return queue_report(run.name, status, list(map(str, disk)))


async def _next_status(connection: "RunConnection") -> RunStatus:
    import anyio

    await anyio.sleep(_WATCH_INTERVAL_S)
    return await read_status(connection, with_in_flight=True)


def render_queues(report: QueueReport) -> RenderableType:
    """Return the status of a run as a terminal table."""
    head = Text.assemble(
        (report.run, "bold"),
        ("   step ", _QUIET),
        str(report.step),
        ("   policy version ", _QUIET),
        str(report.version) if report.version >= 0 else "none yet",
        *([("   finished: ", _QUIET), (report.finished, "green")] if report.finished else []),
        *([(f"   {report.paused}", "yellow")] if report.paused else []),
    )
    paced = Text.assemble(("groups outstanding ", _QUIET), f"{report.groups_outstanding:,}")
    if report.capacity is not None:
        paced.append_text(Text.assemble((" of ", _QUIET), f"{report.capacity:,}"))
    paced.append_text(
        Text.assemble(("   dead letters ", _QUIET), (str(report.dead_letters), "red" if report.dead_letters else ""))
    )
    if report.duplicates:
        paced.append_text(Text.assemble(("   duplicates ", _QUIET), str(report.duplicates)))
    if report.cancelled:
        paced.append_text(Text.assemble(("   cancelled as stale ", _QUIET), f"{report.cancelled:,}"))
    last = [
        Text.assemble((f"{what} ", _QUIET), format_counts(counts))
        for what, counts in (("last step's completions:", report.rows), ("of them truncated:", report.truncated))
        if counts
    ]
    return Group(
        head,
        *(Text(escape_controls(f"{text}: the run waits for room"), "red") for text in report.disk),
        bottleneck_text(report.bottleneck),
        Text(),
        stage_table(report),
        Text(),
        *_consumer_table(report),
        *_memory_lines(report),
        *evaluation_lines(report),
        prompt_counts_text(report),
        paced,
        *last,
    )


def bottleneck_text(found: Bottleneck) -> Text:
    """Return what limits a run as one line."""
    text = Text(escape_controls(str(found)))
    text.stylize("bold", 0, len(text.plain.partition(":")[0]))
    return text


def _consumer_table(report: QueueReport) -> list[RenderableType]:
    """Return a table of the entries that each worker holds, by stage."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for name, stage in report.all_stages.items():
        for consumer, count in sorted(stage.consumers.items()):
            grid.add_row(Text(f"{name} held by", _QUIET), consumer, str(count))
    return [grid, Text()] if grid.row_count else []


def _memory_lines(report: QueueReport) -> list[RenderableType]:
    """Return one line for each machine: what its processes hold, the largest first."""
    lines: list[RenderableType] = []
    for machine in report.memory:
        held = sorted(machine.processes, key=lambda each: -each.bytes)
        parts = [f"{each.name} {format_bytes(each.bytes)}" + _swapped(each) for each in held]
        text = Text.assemble(("memory ", _QUIET), escape_controls(", ".join(parts)))
        text.append(f"   {format_bytes(machine.available)} of {format_bytes(machine.total)} available", _QUIET)
        text.append(f" ({machine.source})" if machine.source != "machine" else "", _QUIET)
        lines.append(text)
    return lines


def _swapped(process: ProcessMemory) -> str:
    return f" ({format_bytes(process.swapped)} swapped out)" if process.swapped else ""


def render_in_flight(shown: Sequence[Activity], count: int, stuck_s: float) -> RenderableType:
    """Return what completions are doing as a terminal table, and a line about those that seem stuck."""
    lines: list[RenderableType] = [_activity_table(shown[:count], stuck_s)] if shown else []
    total = f"{len(shown):,} in flight"
    if len(shown) > count:
        total += f", the {count:,} longest unchanged are shown"
    summary = Text(total, _QUIET)
    if stuck := count_stuck(shown, stuck_s):
        summary.append("; ").append(f"{stuck:,} unchanged for over {format_duration(stuck_s)}", "bold yellow")
    return Group(*lines, summary)


def _activity_table(shown: Sequence[Activity], stuck_s: float) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style=_QUIET)
    table.add_column("for", justify="right", no_wrap=True)
    table.add_column("activity", no_wrap=True, overflow="ellipsis", min_width=12)
    table.add_column("completion", no_wrap=True, overflow="ellipsis", min_width=10)
    table.add_column("turn", justify="right", no_wrap=True)
    for heading in ("versions", "environment", "engine", "worker"):
        table.add_column(heading, no_wrap=True, overflow="ellipsis")
    for each in shown:
        is_stuck = each.seconds > stuck_s
        table.add_row(
            Text(format_duration(each.seconds), "bold yellow" if is_stuck else ""),
            Text(escape_controls(each.text), "yellow" if is_stuck else "cyan"),
            escape_controls(f"{each.prompt} {'(group)' if each.completion is None else f'#{each.completion}'}"),
            "" if each.turn is None else str(each.turn),
            each.versions,
            escape_controls(each.environment),
            escape_controls(each.engine),
            escape_controls(each.worker),
        )
    return table
