"""The command `penstock run`: prepare the run's folder, supervise the run, and print a summary."""

import sys
import time
from pathlib import Path

import anyio
import msgspec
import structlog
from msgspec import Struct

from stream.errors import PenstockError, RunFailedError
from workers.run.progress_display import choose_display, format_duration
from workers.run.role_specs import MakeEngineSpec, MakeRoleSpecs, engine_spec, role_specs
from workers.run.run_folder import lock_folder, write_atomically, write_settings
from workers.run.summary import RunSummary, latest_progress, summarize
from workers.run.supervisor import RunOutcome, Supervisor
from workers.runtime import log_setup as logs
from workers.runtime.exit_codes import ExitCode
from workers.settings import Settings
from workers.settings.toml_file import load_settings

log = structlog.get_logger()


class RunResult(Struct, kw_only=True):
    """Result of a supervised run."""

    outcome: RunOutcome
    summary: RunSummary | None
    """None if the server was lost before the final status was read."""


def run(file: Path, overrides: tuple[str, ...] = (), *, as_json: bool = False, quiet: bool = False) -> ExitCode:
    """Start or resume the run that a settings file describes. Returns the exit code.

    Raises:
        PenstockError: the run cannot start, or it failed.
    """
    settings = load_settings(file, overrides)
    result = supervise(settings, quiet=quiet)
    outcome, summary = result.outcome, result.summary
    if summary is not None and as_json:
        print(msgspec.json.encode(summary).decode(), flush=True)  # noqa: T201  (this is the command's output)
    elif summary is not None and not quiet:
        print(format_summary(summary, settings), flush=True)  # noqa: T201
    raise_for_failure(result, settings)
    if outcome.interrupted:
        tell = f"stopped; `penstock run {settings.folder / 'run.toml'}` resumes"
        print(tell, file=sys.stderr, flush=True)  # noqa: T201
    return ExitCode.INTERRUPTED if outcome.interrupted and outcome.killed else ExitCode.SUCCESS


def supervise(
    settings: Settings,
    *,
    quiet: bool = False,
    make_roles: MakeRoleSpecs = role_specs,
    make_engine: MakeEngineSpec = engine_spec,
) -> RunResult:
    """Supervise a run to its end, then write `summary.json` and `progress.png` to its folder.

    Args:
        settings: settings of the run.
        quiet: show no progress.
        make_roles: returns the specs of all roles except engines.
        make_engine: returns the spec of an engine that the run starts.

    Raises:
        PenstockError: the run cannot start.
    """
    folder = settings.folder
    with lock_folder(folder):
        file = write_settings(settings)
        (folder / "logs").mkdir(exist_ok=True)
        with logs.log_to_file("run", folder / "logs" / "supervisor.log"):
            before, began = latest_progress(folder), time.monotonic()
            with choose_display(quiet) as display:
                outcome = anyio.run(Supervisor(settings, file, display, make_roles, make_engine).run)
            summary = None
            if outcome.view is not None:
                summary = summarize(outcome.view, before, latest_progress(folder), time.monotonic() - began)
                write_atomically(folder / "summary.json", msgspec.json.format(msgspec.json.encode(summary)) + b"\n")
            _draw(folder)
    return RunResult(outcome=outcome, summary=summary)


def raise_for_failure(result: RunResult, settings: Settings) -> None:
    """Raise the error of a failed run.

    Raises:
        RunFailedError: the run failed, its server was lost, or prompts are unaccounted for.
    """
    if result.outcome.failure is not None:
        raise result.outcome.failure
    if result.summary is None:
        raise RunFailedError(f"run {settings.run.name!r} ended, but its server was gone before it could be asked how")
    if not result.summary.is_balanced:
        raise RunFailedError(f"the books of run {settings.run.name!r} do not balance: {result.summary.balance}")


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
    if summary.dead:
        lines.append(f"`penstock dead list {settings.folder}` shows the dead letters")
    return "\n".join(lines)


def _draw(folder: Path) -> None:
    """Plot the run's progress; skipped without a finished step or without matplotlib."""
    try:
        from workers.run.plot import draw_progress
    except ImportError as error:
        log.info("plot.skipped", why=str(error))
        return
    try:
        draw_progress(folder)
    except PenstockError as error:
        log.info("plot.skipped", why=str(error))
