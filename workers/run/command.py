"""The command `penstock run`: prepare the folder, supervise, sum up."""

import sys
import time
from pathlib import Path

import anyio
import msgspec
import structlog
from msgspec import Struct

from stream.errors import PenstockError, RunFailedError
from workers import logs
from workers.run.folder import held, keep_settings, write_whole
from workers.run.progress import display_for, duration
from workers.run.roles import Commands, EngineCommand, commands, engine_command
from workers.run.summary import Summary, newest_progress, summarize
from workers.run.supervisor import Outcome, Supervisor
from workers.settings import Settings
from workers.settings.file import load

log = structlog.get_logger()

_KILLED = 130
"""What a shell says of a command that Ctrl-C ended."""


class Ended(Struct, kw_only=True):
    """A run that was supervised to its end."""

    outcome: Outcome
    summary: Summary | None
    """None where the server was gone before it could be asked."""


def run(file: Path, overrides: tuple[str, ...] = (), *, as_json: bool = False, quiet: bool = False) -> int:
    """Run, or resume, the run that a settings file describes. Returns the exit code.

    Raises:
        PenstockError: it cannot begin, or failed for good.
    """
    settings = load(file, overrides)
    ended = supervise(settings, quiet=quiet)
    outcome, summary = ended.outcome, ended.summary
    if summary is not None and as_json:
        print(msgspec.json.encode(summary).decode(), flush=True)  # noqa: T201  (this is the command's output)
    elif summary is not None and not quiet:
        print(told(summary, settings), flush=True)  # noqa: T201
    judge(ended, settings)
    if outcome.interrupted:
        tell = f"stopped; `penstock run {settings.folder / 'run.toml'}` resumes"
        print(tell, file=sys.stderr, flush=True)  # noqa: T201
    return _KILLED if outcome.interrupted and outcome.killed else 0


def supervise(
    settings: Settings, *, quiet: bool = False, roles: Commands = commands, engine: EngineCommand = engine_command
) -> Ended:
    """Run to the end, write `summary.json` and `progress.png` to the run's folder.

    Args:
        settings: of the run.
        quiet: show no progress.
        roles: the command lines of all roles but the engine.
        engine: the command line of an engine of the run's own.

    Raises:
        PenstockError: it cannot begin.
    """
    folder = settings.folder
    with held(folder):
        file = keep_settings(settings)
        (folder / "logs").mkdir(exist_ok=True)
        with logs.to_file("run", folder / "logs" / "supervisor.log"):
            before, began = newest_progress(folder), time.monotonic()
            with display_for(quiet) as display:
                outcome = anyio.run(Supervisor(settings, file, display, roles, engine).run)
            summary = None
            if outcome.view is not None:
                summary = summarize(outcome.view, before, newest_progress(folder), time.monotonic() - began)
                write_whole(folder / "summary.json", msgspec.json.format(msgspec.json.encode(summary)) + b"\n")
            _draw(folder)
    return Ended(outcome=outcome, summary=summary)


def judge(ended: Ended, settings: Settings) -> None:
    """Raise what there is to complain about.

    Raises:
        RunFailedError: the run failed, or prompts are unaccounted for.
    """
    if ended.outcome.failure is not None:
        raise ended.outcome.failure
    if ended.summary is None:
        raise RunFailedError(f"run {settings.run.name!r} ended, but its server was gone before it could be asked how")
    if not ended.summary.balanced:
        raise RunFailedError(f"the books of run {settings.run.name!r} do not balance: {ended.summary.books}")


def told(summary: Summary, settings: Settings) -> str:
    """The summary for people."""
    lines = [
        f"{summary.steps} steps in {duration(summary.seconds)}; {summary.tokens_per_second:,.0f} trained tokens/s",
        summary.books,
    ]
    if summary.groups_dropped:
        lines.append("dropped: " + ", ".join(f"{reason} {n}" for reason, n in sorted(summary.groups_dropped.items())))
    if summary.rows:
        lines.append("completions: " + ", ".join(f"{state} {n}" for state, n in sorted(summary.rows.items())))
    if summary.staleness.mean is not None:
        lines.append(f"staleness: mean {summary.staleness.mean:.2f}, max {summary.staleness.max:g} versions")
    if summary.dead:
        lines.append(f"`penstock dead list {settings.folder}` shows the dead letters")
    return "\n".join(lines)


def _draw(folder: Path) -> None:
    """Draw the run's progress, where there is any, and matplotlib."""
    try:
        from workers.run.plot import draw
    except ImportError as error:
        log.info("plot.skipped", why=str(error))
        return
    try:
        draw(folder)
    except PenstockError as error:
        log.info("plot.skipped", why=str(error))
