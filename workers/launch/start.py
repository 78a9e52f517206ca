"""The command `penstock run`: prepare the run's folder, supervise the run, and print a summary.

A start begins a new run, resumes a run, or does nothing because the run has finished.
"""

import sys
import time
from pathlib import Path
from typing import Final

import anyio
import click
import msgspec
import structlog
from msgspec import Struct

from stream.connection.run_identity import RunIdentity
from stream.durable import write_file_atomically
from stream.errors import PenstockError, RunFailedError, SettingsError
from stream.operator.status import RunStatus
from stream.wording import format_counts, format_duration, quantity
from workers.check.report_text import print_report
from workers.hub.libraries import say_nothing
from workers.hub.names import bind_revisions, download_names, known_values, print_note, revision_overrides
from workers.launch.preflight import run_preflight_process
from workers.launch.supervisor import RunOutcome, Supervisor
from workers.launch.watch import newest_archived_group, sample_lines
from workers.role import log_setup as logs
from workers.role.exit_codes import ExitCode
from workers.runs.find import explain_missing_file, find_settings_file
from workers.runs.folder import disk_problems, find_newest_run, lock_folder, new_run_name, settings_file
from workers.runs.identity import check_folder, describe_changes
from workers.runs.metrics_file import read_metrics
from workers.runs.progress_picture import draw_progress
from workers.runs.summary import (
    RunSummary,
    describe_early_end,
    describe_rewards,
    describe_totals,
    latest_progress,
    read_summary,
    summarize,
    why_untrained,
)
from workers.settings import Settings
from workers.settings.toml_file import load_settings
from workers.terminal.progress import choose_display
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
    say = say_nothing if quiet else print_note
    settings = bind_revisions(settings, known_values(settings), say)
    finished = finished_summary(settings)
    if finished is not None:
        check_folder(settings)  # an edit of the data is named, also after the end
        print(finished_text(settings, finished), file=sys.stderr, flush=True)  # noqa: T201
        if as_json:
            print(msgspec.json.encode(finished).decode(), flush=True)  # noqa: T201
        return ExitCode.UNTRAINED if finished.why_untrained else ExitCode.SUCCESS
    download_names(settings, say)
    if check and not _passes_check(start, settings, as_json=as_json, quiet=quiet):
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
    return ExitCode.UNTRAINED if summary is not None and summary.why_untrained else ExitCode.SUCCESS


def _passes_check(start: "RunStart", settings: Settings, *, as_json: bool, quiet: bool) -> bool:
    """Test everything before an engine starts, and print the faults. Returns whether there is no error."""
    overrides = (*start.overrides, *revision_overrides(settings))
    report = anyio.run(run_preflight_process, start.file, overrides, settings.hang_timeout_s)
    if report.errors and as_json:
        print(msgspec.json.encode({"preflight": report}).decode(), flush=True)  # noqa: T201
    if report.errors or (report.warnings and not quiet):
        print_report(report, sys.stderr)
    return not report.errors


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
            if outcome.status is not None:
                after, seconds = latest_progress(folder), time.monotonic() - began
                summary = summarize(outcome.status, before, after, seconds, outcome.failure)
                summary.causes |= outcome.dead_causes
                if outcome.failure is None and not outcome.interrupted:
                    summary.finished = True
                    summary.why_untrained = why_untrained(summary.totals, summary.groups_trained, settings)
                _write_summary(folder, summary)
            _draw(folder, outcome.status)
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
        raise RunFailedError(
            f"run {settings.run.name!r} does not account for every prompt: {result.summary.prompt_counts_text}"
        )


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
        summary.prompt_counts_text,
    ]
    if summary.groups_dropped:
        lines.append(f"dropped: {format_counts(dict(sorted(summary.groups_dropped.items())))}")
    if summary.completion_states:
        lines.append(f"completions: {format_counts(dict(sorted(summary.completion_states.items())))}")
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
    if summary.why_untrained:
        lines += ["", summary.why_untrained]
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


_NOT_SETTINGS: Final = (".py", ".jsonl", ".parquet")


class RunStart(Struct, frozen=True, kw_only=True):
    """The settings of a start."""

    file: Path
    overrides: tuple[str, ...]
    """Values of single settings, the name of a new run included."""
    settings: Settings
    earlier: Path | None = None
    """`run.toml` of the newest earlier run of the same file, if this is a new one."""


def prepare_start(target: str, overrides: tuple[str, ...]) -> RunStart:
    """Find the settings of a run and name it if it has no name.

    Args:
        target: settings file; or folder or name of a run, which is resumed.
        overrides: values of single settings; they take precedence over the file.

    Raises:
        SettingsError: there is no such file and no such run, or the settings are invalid.
    """
    file = find_settings_file(target)
    if file is None or file.suffix in _NOT_SETTINGS:
        raise SettingsError(explain_missing_file(target) or _explain_target(target))
    settings = load_settings(file, overrides)
    if settings.run.name:
        return RunStart(file=file, overrides=overrides, settings=settings)
    earlier = find_newest_run(file)
    overrides = (*overrides, f"run.name={new_run_name(file)}")
    return RunStart(file=file, overrides=overrides, settings=load_settings(file, overrides), earlier=earlier)


def _explain_target(target: str) -> str:
    """Return why a target is no settings file and no run, and where it belongs."""
    problem = f"{target or repr(target)} is neither a settings file, nor the folder or the name of a run"
    name, _, attribute = target.partition(":")
    if name.endswith(".py"):
        ref = target if attribute else f"{target}:NAME"
        return f"{problem}: Python code is named in a settings file; `penstock check {ref}` tries it"
    if name.endswith(_NOT_SETTINGS):
        return f'{problem}: prompts are named in a settings file, as [data] path = "{target}"'
    if (Path(target) / "config.json").is_file():
        return f'{problem}: a model is named in a settings file, as [model] path = "{target}"'
    return problem


def finished_summary(settings: Settings) -> RunSummary | None:
    """Return the summary of a run that has finished, if no setting was changed since; None if it has work to do."""
    summary = read_summary(settings.folder)
    if summary is None or not summary.finished:
        return None
    try:
        stored = load_settings(settings.folder / "run.toml")
    except PenstockError:
        return None
    return summary if stored == settings else None


def finished_text(settings: Settings, summary: RunSummary) -> str:
    """Say that a run has finished, and what can be done with it."""
    text = (
        f"run {settings.run.name} has finished: {quantity(summary.steps, 'step')}, "
        f"{quantity(summary.groups_trained, 'group')} trained. `penstock export {settings.folder} OUT` copies its "
        "model. If train.max_steps ended it, a larger one goes on with it; to start anew, give it another run.name"
    )
    return f"{text}. {summary.why_untrained}" if summary.why_untrained else text


def start_lines(settings: Settings, identity: RunIdentity | None, earlier: Path | None = None) -> list[str]:
    """Describe a start: what it begins or resumes, and which settings and code differ from the last start."""
    if identity is None:
        lines = [f"new run {settings.run.name} in {settings.folder}"]
        if earlier is not None:
            lines.append(f"`penstock run {earlier.parent}` resumes the one before")
        return lines
    step, limit = latest_progress(settings.folder).step, settings.train.max_steps
    what = f"resuming run {settings.run.name} at step {step}" + (f" of {limit}" if limit else "")
    return ["; ".join([what, *describe_changes(identity, settings)])]


def print_start(lines: list[str]) -> None:
    """Print the description to stderr."""
    for line in lines:
        click.echo(line, err=True)
