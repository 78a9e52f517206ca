"""The command `penstock run`: prepare the run's folder, supervise the run, and print a summary."""

import sys
import time
from pathlib import Path

import anyio
import msgspec
import structlog
from msgspec import Struct

from stream.durable import write_file_atomically
from stream.errors import RunFailedError
from stream.operator.status import RunStatus
from workers.check.report_text import print_report
from workers.role import log_setup as logs
from workers.role.exit_codes import ExitCode
from workers.run.preflight_process import run_preflight_process
from workers.run.run_start import finished_summary, finished_text, prepare_start, print_start, start_lines
from workers.run.sampled_completion import newest_archived_group, sample_lines
from workers.run.supervisor import RunOutcome, Supervisor
from workers.runs.folder import disk_problems, lock_folder, settings_file
from workers.runs.identity import check_folder
from workers.runs.metrics_file import read_metrics
from workers.runs.progress_picture import draw_progress
from workers.runs.summary import (
    RunSummary,
    describe_early_end,
    describe_rewards,
    describe_totals,
    latest_progress,
    nothing_learned,
    summarize,
)
from workers.settings import Settings
from workers.terminal.progress import choose_display, format_duration
from workers.train.checkpointing.object_store import find_copy, restore

log = structlog.get_logger()

_WIDTH = 100


class RunResult(Struct, kw_only=True):
    """Result of a supervised run."""

    outcome: RunOutcome
    summary: RunSummary | None
    """None if the server was lost before the final status was read."""


def run(
    target: str,
    overrides: tuple[str, ...] = (),
    *,
    as_json: bool = False,
    quiet: bool = False,
    check: bool = True,
) -> ExitCode:
    """Start or resume a run. Returns the exit code.

    Args:
        target: settings file; or folder or name of a run, which is resumed.
        overrides: values of single settings; they take precedence over the file.
        as_json: print the summary as JSON.
        quiet: show no progress.
        check: test everything before an engine starts (`workers.check`).

    Raises:
        PenstockError: the run cannot start, or it failed.
    """
    start = prepare_start(target, overrides)
    settings = start.settings
    if (copy := find_copy(settings)) is not None:
        with lock_folder(settings.folder):
            url = restore(copy, settings)
        print_start([f"{settings.folder} was lost: restored step {copy.step} from {url}"])
    finished = finished_summary(settings)
    if finished is not None:
        check_folder(settings)  # an edit of the data is named, also after the end
        print(finished_text(settings, finished), file=sys.stderr, flush=True)  # noqa: T201
        if as_json:
            print(msgspec.json.encode(finished).decode(), flush=True)  # noqa: T201
        return ExitCode.UNTRAINED if finished.verdict else ExitCode.SUCCESS
    if check:
        report = anyio.run(run_preflight_process, start.file, start.overrides, settings.hang_timeout_s)
        if report.errors and as_json:
            print(msgspec.json.encode({"preflight": report}).decode(), flush=True)  # noqa: T201
        if report.errors or (report.warnings and not quiet):
            print_report(report, sys.stderr)
        if report.errors:
            return ExitCode.USAGE
    result = supervise(settings, quiet=quiet, earlier=start.earlier)
    outcome, summary = result.outcome, result.summary
    if summary is not None and as_json:
        print(msgspec.json.encode(summary).decode(), flush=True)  # noqa: T201  (this is the command's output)
    elif summary is not None and not quiet and (summary.fed or not outcome.interrupted):
        print(format_summary(summary, settings), flush=True)  # noqa: T201
    raise_for_failure(result, settings)
    if outcome.interrupted:
        tell = f"stopped; `penstock run {settings.folder}` resumes"
        print(tell, file=sys.stderr, flush=True)  # noqa: T201
        return ExitCode.INTERRUPTED if outcome.killed else ExitCode.SUCCESS
    return ExitCode.UNTRAINED if summary is not None and summary.verdict else ExitCode.SUCCESS


def supervise(
    settings: Settings,
    *,
    quiet: bool = False,
    earlier: Path | None = None,
) -> RunResult:
    """Supervise a run to its end, then write `summary.json` and `progress.png` to its folder.

    Args:
        settings: settings of the run.
        quiet: show no progress.
        earlier: `run.toml` of an earlier run of the same settings file, if this is a new run.

    Raises:
        PenstockError: the run cannot start.
    """
    folder = settings.folder
    with lock_folder(folder):
        check = check_folder(settings)
        print_start(start_lines(settings, check.identity, earlier))
        file = settings_file(settings)
        (folder / "logs").mkdir(exist_ok=True)
        with logs.log_to_file("run", folder / "logs" / "supervisor.log"):
            before, began = latest_progress(folder), time.monotonic()
            with choose_display(quiet) as display:
                outcome = anyio.run(Supervisor(settings, file, display, check).run)
            summary = None
            if outcome.view is not None:
                after, seconds = latest_progress(folder), time.monotonic() - began
                summary = summarize(outcome.view, before, after, seconds, outcome.failure)
                summary.causes |= outcome.dead_causes
                if outcome.failure is None and not outcome.interrupted:
                    summary.finished = True
                    summary.verdict = nothing_learned(summary.totals, summary.groups_trained, settings)
                _write_summary(folder, summary)
            _draw(folder, outcome.view)
    return RunResult(outcome=outcome, summary=summary)


def raise_for_failure(result: RunResult, settings: Settings) -> None:
    """Raise the error of a failed run.

    Raises:
        RunFailedError: the run failed, its server was lost, or prompts are unaccounted for.
    """
    if result.outcome.failure is not None:
        raise _with_full_disk(settings.folder, result.outcome.failure)
    if result.summary is None:
        raise RunFailedError(f"run {settings.run.name!r} ended, but its server was gone before it could be asked how")
    if not result.summary.is_balanced:
        raise RunFailedError(f"the books of run {settings.run.name!r} do not balance: {result.summary.balance}")


def _with_full_disk(folder: Path, failure: RunFailedError) -> RunFailedError:
    """Return a failure with its cause first if a disk of the run is full.

    A role that could not write often could not write why, either.
    """
    problem = next(iter(disk_problems(folder, None)), None)
    if problem is None or str(problem) in str(failure):
        return failure
    return RunFailedError(
        f"{problem}: make room there and run again, the run resumes from its last checkpoint. What failed first: "
        f"{failure}",
        failure.cause,
    )


def format_summary(summary: RunSummary, settings: Settings) -> str:
    """Format a summary for people."""
    lines = [
        f"{summary.steps} steps in {format_duration(summary.seconds)}; {summary.tokens_per_second:,.0f} tokens/s",
        summary.balance,
    ]
    if summary.groups_dropped:
        lines.append("dropped: " + ", ".join(f"{reason} {n}" for reason, n in sorted(summary.groups_dropped.items())))
    if summary.completion_states:
        lines.append(
            "completions: " + ", ".join(f"{state} {n}" for state, n in sorted(summary.completion_states.items()))
        )
    if summary.staleness.mean is not None:
        lines.append(f"staleness: mean {summary.staleness.mean:.2f}, max {summary.staleness.max:g} versions")
    if summary.rejected_rows:
        lines.append(
            f"{summary.rejected_rows} rows of the data are no prompts; {settings.folder}/logs/feed-0.log has why"
        )
    dropped = sum(summary.groups_dropped.values())
    texts = (
        describe_totals(summary.totals),
        describe_rewards(read_metrics(settings.folder / "metrics.jsonl")),
        describe_early_end(summary.steps, dropped, settings) if summary.finished else "",
    )
    lines += filter(None, texts)
    lines += [f"{state}: {cause.short_headline}" for state, cause in sorted(summary.causes.items())]
    if summary.dead:
        lines.append(f"`penstock dead list {settings.folder}` shows the dead letters")
    if summary.verdict:
        lines += ["", summary.verdict]
        group = newest_archived_group(settings.folder)
        if group is not None and group.completions:
            shown = next((each for each in group.completions if each.failure is None), group.completions[0])
            lines += ["", *(line.plain for line in sample_lines(group, shown, "one of the last completions", _WIDTH))]
    return "\n".join(lines)


def _write_summary(folder: Path, summary: RunSummary) -> None:
    """Write `summary.json`. A full disk must not hide why the run ended; the file is missing then."""
    try:
        write_file_atomically(folder / "summary.json", msgspec.json.format(msgspec.json.encode(summary)) + b"\n")
    except OSError as error:
        log.warning("summary.not_written", why=str(error))


def _draw(folder: Path, status: RunStatus | None) -> None:
    """Plot the run's progress. Drawing never ends a run: whatever fails, the plot is missing and the log says why."""
    try:
        draw_progress(folder, status)
    except Exception as error:  # noqa: BLE001  (matplotlib and Pillow raise what they like, such as on a full disk)
        log.info("plot.skipped", why=f"{type(error).__name__}: {error}")
