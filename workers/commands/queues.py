"""`penstock queues`: show where a run's prompts are. Read-only; it creates no key."""

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stream.connection.run_connection import RunConnection
from stream.errors import NoRunError, PenstockError, SettingsError
from stream.operator.bottleneck import Bottleneck, find_bottleneck
from stream.operator.in_flight import groups_in_flight
from stream.operator.run_status import EvaluationStatus, RunStatus, StageStatus, read_status
from stream.validity import TruncationReason
from workers.run.run_info import RunLocation, find_run, read_run_status, with_run
from workers.runs.folder import disk_problems
from workers.runs.summary import has_finished
from workers.runs.transcript import escape_controls
from workers.terminal.output import make_console, print_json
from workers.terminal.progress import balance_text, evaluation_lines, stage_table

_WATCH_INTERVAL_S = 1.0
_START_TIMEOUT_S: Final = 600.0
"""Time to wait for a run that is about to start."""
_TRUNCATION_REASONS = frozenset(TruncationReason)


class StageReport(Struct, kw_only=True):
    """One stage, in the form of `--json`."""

    depth: int
    """Unfinished entries; in `scored`, without entries that the trainer has ended and that wait for a checkpoint."""
    claimed: int
    delayed: int
    """Entries that wait for their retry delay."""
    lag: int
    """Entries that were never claimed."""
    oldest_age_s: float
    rate: float
    """Entries completed per second, over the last minute."""
    consumers: dict[str, int]
    """Leased entries by worker, without idle workers."""


class EvaluationReport(Struct, kw_only=True):
    """The running evaluation, or the last one, in the form of `--json`."""

    stages: dict[str, StageReport]
    version: int
    step: int
    prompts: int
    """Number of prompts in the evaluation."""
    open: int
    """Prompts not yet sampled and scored."""
    dead: int
    under_way: bool
    result: dict[str, Any]
    """Result of the last finished evaluation, as in `eval.jsonl`; empty before the first."""


class QueueReport(Struct, kw_only=True):
    """The status of a run, in the form of `--json`."""

    run: str
    at: float
    """Unix time in seconds, by the server's clock."""
    snapshot: str
    """Id of this state; two reports with one id have the same counts."""
    bottleneck: Bottleneck
    """What limits the run now."""
    stages: dict[str, StageReport]
    fed: int
    trained: int
    dropped: int
    dropped_by_reason: dict[str, int]
    dead: int
    outstanding: int
    """Unfinished prompts: `fed = trained + dropped + dead + outstanding`."""
    groups_outstanding: int
    """Outstanding groups, at most `capacity`."""
    capacity: int | None
    """Largest number of outstanding groups; None if unknown."""
    version: int
    step: int
    dead_letters: int
    """Dead letters, including entries of unknown origin."""
    duplicates: int
    cancelled: int
    """Attempts cancelled because they were stale (`pacing.stale_policy = "cancel"`)."""
    rows: dict[str, int]
    """Completions of the last step by state: `valid`, or why they are invalid."""
    truncated: dict[str, int]
    """Truncated completions of the last step by reason, trained or not."""
    finished: str
    """Reason why the run has finished; empty: it has not."""
    paused_by: str
    """Operator who paused the run; empty: it is not paused."""
    paused_at: float | None
    """Unix time of the pause in seconds, by the server's clock; None if not paused."""
    evaluation: EvaluationReport | None
    """None: the run has no evaluation."""
    disk: list[str] = []
    """Disks that cannot be written, for which the run waits."""


def show_queues(target: str | None, redis: str, *, as_json: bool = False, watch: bool = False) -> None:
    """Print the number of prompts in each stage of a run, once, or every second from when it runs until Ctrl-C.

    Raises:
        PenstockError: there is no such run.
    """
    if watch:
        with suppress(KeyboardInterrupt):  # how a watch ends, while it waits for the run, too
            location = _wait_for_run(target, redis)
            with_run(location, partial(_watch, location.folder, as_json=as_json))
        return
    location = find_run(target, redis)
    status = read_run_status(location)
    disk = [str(problem) for problem in disk_problems(location.folder, status)]
    if as_json:
        print_json(queue_report(location.run, status, disk))
    else:
        make_console().print(render_queues(location.run, status, disk))


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


def _wait_for_run(target: str | None, redis: str) -> RunLocation:
    """Return a run as soon as it runs; one that has finished at once.

    Raises:
        SettingsError: `target` is a settings file with an error.
        PenstockError: no run has started in time.
    """
    has_told, deadline = False, time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            location = find_run(target, redis)
            if location.url or (location.folder is not None and has_finished(location.folder)):
                return location
            missing = PenstockError(f"the run in {location.folder} does not run")
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


def queue_report(run: str, status: RunStatus, disk: Sequence[str] = ()) -> QueueReport:
    """Return the status of a run in the form of `--json`; `disk`: the disks that cannot be written."""
    return QueueReport(
        run=run,
        at=status.now_ms / 1000,
        snapshot=status.snapshot,
        bottleneck=find_bottleneck(status, groups_in_flight(status)),
        stages=_stage_reports(status.stages),
        **status.balance,
        dropped_by_reason=status.dropped,
        groups_outstanding=status.outstanding,
        capacity=int(status.meta["capacity"]) if "capacity" in status.meta else None,
        version=status.version,
        step=int(status.policy.get("step", 0)),
        dead_letters=status.dead,
        duplicates=status.counts.get("duplicates", 0),
        cancelled=status.counts.get("cancelled", 0),
        rows=_counts_with_prefix(status, "rows/"),
        truncated={
            reason: n
            for reason, n in _counts_with_prefix(status, "truncated/").items()
            if reason in _TRUNCATION_REASONS
        },
        finished=status.meta.get("finished", ""),
        paused_by=status.paused.paused_by if status.paused else "",
        paused_at=status.paused.paused_at if status.paused else None,
        evaluation=_evaluation_report(status.evaluation) if status.evaluation else None,
        disk=list(disk),
    )


def _stage_reports(stages: dict[str, StageStatus]) -> dict[str, StageReport]:
    return {
        name: StageReport(
            depth=stage.depth - stage.marked,
            claimed=stage.claimed,
            delayed=stage.delayed,
            lag=stage.lag,
            oldest_age_s=stage.oldest_age_ms / 1000,
            rate=stage.rate,
            consumers={consumer: count for consumer, count in stage.consumers.items() if count},
        )
        for name, stage in stages.items()
    }


def _evaluation_report(status: EvaluationStatus) -> EvaluationReport:
    return EvaluationReport(
        stages=_stage_reports(status.stages),
        version=status.version,
        step=status.step,
        prompts=status.total,
        open=status.unfinished,
        dead=status.total - status.unfinished - status.results if status.is_running else 0,
        under_way=status.is_running,
        result=status.result,
    )


def render_queues(run: str, status: RunStatus, disk: Sequence[str] = ()) -> RenderableType:
    """Return the status of a run as a terminal table; `disk`: the disks that cannot be written."""
    report = queue_report(run, status, disk)
    quiet = "bright_black"
    head = Text.assemble(
        (run, "bold"),
        ("   step ", quiet),
        str(report.step),
        ("   policy version ", quiet),
        str(report.version) if report.version >= 0 else "none yet",
        *([("   finished: ", quiet), (report.finished, "green")] if report.finished else []),
        *([(f"   {status.paused}", "yellow")] if status.paused else []),
    )
    paced = Text.assemble(("groups outstanding ", quiet), f"{report.groups_outstanding:,}")
    if report.capacity is not None:
        paced.append_text(Text.assemble((" of ", quiet), f"{report.capacity:,}"))
    paced.append_text(
        Text.assemble(("   dead letters ", quiet), (str(report.dead_letters), "red" if status.dead else ""))
    )
    if report.duplicates:
        paced.append_text(Text.assemble(("   duplicates ", quiet), str(report.duplicates)))
    if report.cancelled:
        paced.append_text(Text.assemble(("   cancelled as stale ", quiet), f"{report.cancelled:,}"))
    last = [
        Text.assemble((f"{what} ", quiet), _format_counts(counts))
        for what, counts in _last_step_counts(report)
        if counts
    ]
    return Group(
        head,
        *(Text(escape_controls(f"{text}: the run waits for room"), "red") for text in disk),
        bottleneck_text(report.bottleneck),
        Text(),
        stage_table(status),
        Text(),
        *_consumer_table(report),
        *evaluation_lines(status),
        balance_text(status),
        paced,
        *last,
    )


def bottleneck_text(found: Bottleneck) -> Text:
    """Return what limits a run as one line."""
    text = Text(escape_controls(str(found)))
    text.stylize("bold", 0, len(text.plain.partition(":")[0]))
    return text


def _last_step_counts(report: QueueReport) -> list[tuple[str, dict[str, int]]]:
    return [("last step's completions:", report.rows), ("of them truncated:", report.truncated)]


def _format_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def _counts_with_prefix(status: RunStatus, prefix: str) -> dict[str, int]:
    """Return the last step's counters with this prefix, by the rest of their names."""
    found = {name.removeprefix(prefix): value for name, value in status.metrics.items() if name.startswith(prefix)}
    return {name: int(value) for name, value in sorted(found.items()) if isinstance(value, int | float)}


def _consumer_table(report: QueueReport) -> list[RenderableType]:
    """Return a table of the entries that each worker holds, by stage."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for name, stage in (report.stages | (report.evaluation.stages if report.evaluation else {})).items():
        for consumer, count in sorted(stage.consumers.items()):
            grid.add_row(Text(f"{name} held by", "bright_black"), consumer, str(count))
    return [grid, Text()] if grid.row_count else []


async def _watch(folder: Path | None, connection: "RunConnection", *, as_json: bool) -> None:
    """Print the status every second until the run has finished."""
    import anyio.to_thread
    from rich.live import Live

    status = await first_status(connection)
    with Live(console=make_console(), auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as screen:
        if as_json:
            screen.stop()
        while True:
            disk = [str(problem) for problem in await anyio.to_thread.run_sync(disk_problems, folder, status)]
            if as_json:
                print_json(queue_report(connection.run, status, disk))
            else:
                screen.update(render_queues(connection.run, status, disk), refresh=True)
            if status.meta.get("finished"):
                return
            await anyio.sleep(_WATCH_INTERVAL_S)
            status = await read_status(connection, with_in_flight=True)
