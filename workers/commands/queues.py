"""`penstock queues`: where a run's prompts are. Looking changes nothing, and creates no key."""

from typing import Any

import anyio
import msgspec
from msgspec import Struct
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stream.connection.run_connection import RunConnection
from stream.operator.run_status import EvaluationStatus, RunStatus, StageStatus, read_status
from stream.validity import TruncationReason
from workers.run.progress_display import balance_text, evaluation_lines, stage_table
from workers.run.run_info import find_run, with_run

_WATCH_INTERVAL_S = 1.0
_TRUNCATION_REASONS = frozenset(TruncationReason)


class StageReport(Struct, kw_only=True):
    """One stage, as `--json` says it."""

    depth: int
    """Entries that are not done with; in `scored`, those trained and waiting for a checkpoint are."""
    claimed: int
    delayed: int
    lag: int
    oldest_age_s: float
    rate: float
    consumers: dict[str, int]


class EvaluationReport(Struct, kw_only=True):
    """The evaluation under way, or the last one, as `--json` says it."""

    stages: dict[str, StageReport]
    version: int
    step: int
    prompts: int
    open: int
    """Of them, those that are yet to be sampled and scored."""
    dead: int
    under_way: bool
    result: dict[str, Any]
    """Of the last one that is over: a line of `eval.jsonl`; empty before the first."""


class QueueReport(Struct, kw_only=True):
    """What `--json` says; keys are only ever added."""

    run: str
    at: float
    """Unix time in seconds, by the server's clock."""
    stages: dict[str, StageReport]
    fed: int
    trained: int
    dropped: int
    dropped_by_reason: dict[str, int]
    dead: int
    outstanding: int
    """Prompts without an end: `fed = trained + dropped + dead + outstanding`."""
    groups_outstanding: int
    """Groups that pacing counts."""
    capacity: int | None
    """How many of them there may be; None where nobody has said."""
    version: int
    step: int
    dead_letters: int
    """Foreign junk included."""
    duplicates: int
    cancelled: int
    """Attempts that were cancelled for their age (`pacing.stale_policy = "cancel"`)."""
    rows: dict[str, int]
    """Completions of the last step by state: `valid`, or why not."""
    truncated: dict[str, int]
    """Completions of the last step that were cut short, by reason, whatever became of them."""
    finished: str
    """Why the run has ended; empty while it goes on."""
    paused_by: str
    """Who paused the run; empty while it goes on."""
    paused_at: float | None
    """Unix time in seconds."""
    evaluation: EvaluationReport | None
    """None where nothing is evaluated."""


def show_queues(target: str | None, redis: str, *, as_json: bool = False, watch: bool = False) -> None:
    """Print where a run's prompts are, once or every second.

    Raises:
        PenstockError: no such run.
    """
    place = find_run(target, redis)

    async def main(connection: RunConnection) -> None:
        if watch:
            await _watch(connection, as_json)
        else:
            _print(
                queue_report(connection.run, await read_status(connection))
                if as_json
                else render_queues(connection.run, await read_status(connection))
            )

    try:
        with_run(place, main)
    except KeyboardInterrupt:
        if not watch:
            raise


def queue_report(run: str, view: RunStatus) -> QueueReport:
    """A look at a run, for programs."""
    return QueueReport(
        run=run,
        at=view.now_ms / 1000,
        stages=_stage_reports(view.stages),
        **view.balance,
        dropped_by_reason=view.dropped,
        groups_outstanding=view.outstanding,
        capacity=int(view.meta["capacity"]) if "capacity" in view.meta else None,
        version=view.version,
        step=int(view.policy.get("step", 0)),
        dead_letters=view.dead,
        duplicates=view.counts.get("duplicates", 0),
        cancelled=view.counts.get("cancelled", 0),
        rows=_counts_with_prefix(view, "rows/"),
        truncated={
            reason: n for reason, n in _counts_with_prefix(view, "truncated/").items() if reason in _TRUNCATION_REASONS
        },
        finished=view.meta.get("finished", ""),
        paused_by=view.paused.paused_by if view.paused else "",
        paused_at=view.paused.paused_at if view.paused else None,
        evaluation=_evaluation_report(view.evaluation) if view.evaluation else None,
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


def _evaluation_report(view: EvaluationStatus) -> EvaluationReport:
    return EvaluationReport(
        stages=_stage_reports(view.stages),
        version=view.version,
        step=view.step,
        prompts=view.total,
        open=view.unfinished,
        dead=view.total - view.unfinished - view.results if view.is_running else 0,
        under_way=view.is_running,
        result=view.result,
    )


def render_queues(run: str, view: RunStatus) -> RenderableType:
    """A look at a run, for people."""
    told = queue_report(run, view)
    quiet = "bright_black"
    head = Text.assemble(
        (run, "bold"),
        ("   step ", quiet),
        str(told.step),
        ("   policy version ", quiet),
        str(told.version) if told.version >= 0 else "none yet",
        *([("   finished: ", quiet), (told.finished, "green")] if told.finished else []),
        *([(f"   {view.paused}", "yellow")] if view.paused else []),
    )
    paced = Text.assemble(("groups outstanding ", quiet), f"{told.groups_outstanding:,}")
    if told.capacity is not None:
        paced.append_text(Text.assemble((" of ", quiet), f"{told.capacity:,}"))
    paced.append_text(Text.assemble(("   dead letters ", quiet), (str(told.dead_letters), "red" if view.dead else "")))
    if told.duplicates:
        paced.append_text(Text.assemble(("   duplicates ", quiet), str(told.duplicates)))
    if told.cancelled:
        paced.append_text(Text.assemble(("   cancelled for age ", quiet), f"{told.cancelled:,}"))
    last = [
        Text.assemble((f"{what} ", quiet), _format_counts(counts)) for what, counts in _last_step_counts(told) if counts
    ]
    return Group(
        head,
        Text(),
        stage_table(view),
        Text(),
        *_consumer_table(told),
        *evaluation_lines(view),
        balance_text(view),
        paced,
        *last,
    )


def _last_step_counts(told: QueueReport) -> list[tuple[str, dict[str, int]]]:
    return [("last step's completions:", told.rows), ("of them cut short:", told.truncated)]


def _format_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def _counts_with_prefix(view: RunStatus, prefix: str) -> dict[str, int]:
    """Counters of the last step whose names begin so, by the rest of their names."""
    found = {name.removeprefix(prefix): value for name, value in view.metrics.items() if name.startswith(prefix)}
    return {name: int(value) for name, value in sorted(found.items()) if isinstance(value, int | float)}


def _consumer_table(told: QueueReport) -> list[RenderableType]:
    """Who holds how much of each stage."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for name, stage in (told.stages | (told.evaluation.stages if told.evaluation else {})).items():
        for consumer, count in sorted(stage.consumers.items()):
            grid.add_row(Text(f"{name} held by", "bright_black"), consumer, str(count))
    return [grid, Text()] if grid.row_count else []


async def _watch(connection: RunConnection, as_json: bool) -> None:
    """Look every second, until the run has finished."""
    with Live(console=Console(), auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as screen:
        if as_json:
            screen.stop()
        while True:
            view = await read_status(connection)
            if as_json:
                _print(queue_report(connection.run, view))
            else:
                screen.update(render_queues(connection.run, view), refresh=True)
            if view.meta.get("finished"):
                return
            await anyio.sleep(_WATCH_INTERVAL_S)


def _print(what: Any) -> None:
    if isinstance(what, QueueReport):
        print(msgspec.json.encode(what).decode(), flush=True)  # noqa: T201  (this is the command's output)
    else:
        Console().print(what)
