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
from stream.operator.run_status import RunStatus
from workers.run.identity_check import NOTHING, Accept, check_folder
from workers.run.plot import draw_progress
from workers.run.preflight.findings import render_findings
from workers.run.preflight.preflight_process import print_report, run_preflight_process
from workers.run.process_launcher import ProcessLauncher
from workers.run.restore import restore_if_lost
from workers.run.role_specs import LIGHT_MODULES, MakeEngineSpec, MakeRoleSpecs, engine_spec, role_specs, torch_modules
from workers.run.run_start import finished_summary, finished_text, prepare_start, print_start, start_lines
from workers.run.sampled_completion import newest_archived_group, sample_lines
from workers.run.supervisor import RunOutcome, Supervisor
from workers.runs.folder import disk_problems, lock_folder, settings_file
from workers.runs.metrics_file import read_metrics
from workers.runs.summary import (
    RunSummary,
    describe_early_end,
    describe_rewards,
    describe_totals,
    latest_progress,
    nothing_learned,
    summarize,
)
from workers.runtime import log_setup as logs
from workers.runtime.exit_codes import ExitCode
from workers.runtime.model_config import modeling_module
from workers.settings import Settings
from workers.terminal.progress import choose_display, format_duration

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
    accept: Accept = NOTHING,
    check: bool = True,
    launcher: ProcessLauncher | None = None,
) -> ExitCode:
    """Start or resume a run. Returns the exit code.

    Args:
        target: settings file; or folder or name of a run, which is resumed.
        overrides: values of single settings; they take precedence over the file.
        as_json: print the summary as JSON.
        quiet: show no progress.
        accept: changes since the last start that would be refused otherwise.
        check: test everything before an engine starts (`workers.run.preflight`).
        launcher: starts the processes, and is closed with the run; None: a new one.

    Raises:
        PenstockError: the run cannot start, or it failed.
    """
    start = prepare_start(target, overrides)
    settings = start.settings
    if (restored := restore_if_lost(settings)) is not None:
        newer = f"; what is newer there is damaged: {restored.problem}" if restored.problem else ""
        print_start([f"{settings.folder} was lost: restored step {restored.step} from {restored.url}{newer}"])
    finished = finished_summary(settings) if accept == NOTHING else None
    if finished is not None:
        check_folder(settings, accept)  # an edit of data, rewards or code is named, also after the end
        print(finished_text(settings, finished), file=sys.stderr, flush=True)  # noqa: T201
        if as_json:
            print(msgspec.json.encode(finished).decode(), flush=True)  # noqa: T201
        return ExitCode.UNTRAINED if finished.verdict else ExitCode.SUCCESS
    with launcher or ProcessLauncher() as processes:
        processes.preload(torch_modules(), (modeling_module(Path(settings.model.path)),))
        processes.preload(LIGHT_MODULES)
        if check:
            report = anyio.run(run_preflight_process, processes, start.file, start.overrides, settings.hang_timeout_s)
            if report.errors and as_json:
                print(msgspec.json.encode({"preflight": report}).decode(), flush=True)  # noqa: T201
            if report.errors or (report.warnings and not quiet):
                print_report(render_findings(report))
            if report.errors:
                return ExitCode.USAGE
        result = supervise(settings, quiet=quiet, accept=accept, launcher=processes, earlier=start.earlier)
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
    make_roles: MakeRoleSpecs = role_specs,
    make_engine: MakeEngineSpec = engine_spec,
    accept: Accept = NOTHING,
    launcher: ProcessLauncher | None = None,
    earlier: Path | None = None,
) -> RunResult:
    """Supervise a run to its end, then write `summary.json` and `progress.png` to its folder.

    Args:
        settings: settings of the run.
        quiet: show no progress.
        make_roles: returns the specs of all roles except engines.
        make_engine: returns the spec of an engine that the run starts.
        accept: changes since the last start that would be refused otherwise.
        launcher: starts the processes; None: a new one.
        earlier: `run.toml` of an earlier run of the same settings file, if this is a new run.

    Raises:
        PenstockError: the run cannot start.
    """
    folder = settings.folder
    with lock_folder(folder):
        check = check_folder(settings, accept)
        print_start(start_lines(settings, check, earlier))
        file = settings_file(settings)
        (folder / "logs").mkdir(exist_ok=True)
        with logs.log_to_file("run", folder / "logs" / "supervisor.log"):
            before, began = latest_progress(folder), time.monotonic()
            with choose_display(quiet) as display:
                outcome = anyio.run(Supervisor(settings, file, display, make_roles, make_engine, check, launcher).run)
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
