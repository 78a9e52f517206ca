"""One run of real processes under the project's own supervisor, watched or disturbed by a function beside it.

Every program here makes its run by `supervise`: on a private Redis, with a scripted engine (`engine.py`) and a trainer
whose learner is a witness (`witness.py`). The programs that print a report begin and conclude alike. Linux only:
processes are found through /proc.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import anyio
import psutil

from stream.connection.run_connection import RunConnection, connect
from stream.errors import PenstockError
from stream.operator.status import RunStatus, read_status
from tests.soak.project import ENGINE_PROGRAM, ROLE_PROGRAM, commands
from workers.launch.specs import ENGINE
from workers.launch.supervisor import RunOutcome, Supervisor
from workers.role import log_setup as logs
from workers.runs.folder import lock_folder, write_settings
from workers.runs.live_run import read_live
from workers.settings import Settings
from workers.terminal.progress import ProgressDisplay, SilentDisplay

SERVER = "server"
Beside = Callable[[RunConnection], Awaitable[None]]
"""Runs beside the supervisor once every role has started; it is cancelled when the run has ended."""


def supervise(
    settings: Settings,
    beside: Beside | None = None,
    *,
    limit_s: float,
    display: ProgressDisplay | None = None,
    inside: AbstractAsyncContextManager[Any] | None = None,
    **programs: tuple[str, ...],
) -> RunOutcome | None:
    """Supervise the run to its end; returns None if that did not come in time.

    Args:
        settings: settings of the run.
        beside: watches or disturbs the run.
        limit_s: seconds after which the run counts as hanging.
        display: shows progress; None: nothing does.
        inside: is open while the run is supervised.
        programs: Python's arguments that start a role or the engine, in the place of those in `project.commands`.
    """
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    (settings.folder / "logs").mkdir(parents=True, exist_ok=True)
    outcomes: list[RunOutcome] = []

    async def run_beside() -> None:
        if beside is not None:
            async with connected(settings.folder) as connection:
                await beside(connection)

    async def main() -> None:
        with anyio.move_on_after(limit_s):
            async with inside or nullcontext(), anyio.create_task_group() as tasks:
                tasks.start_soon(run_beside)
                with display or SilentDisplay() as shown, commands(settings, **programs):
                    outcomes.append(await Supervisor(settings, file, shown).run())
                tasks.cancel_scope.cancel()

    with lock_folder(settings.folder), logs.log_to_file("soak", settings.folder / "logs" / "supervisor.log"):
        file = write_settings(settings)
        anyio.run(main)
    return outcomes[0] if outcomes else None


@asynccontextmanager
async def connected(folder: Path) -> AsyncIterator[RunConnection]:
    """Connect to the run in this folder as soon as its engines run, and with them every role."""
    while (live := await anyio.to_thread.run_sync(read_live, folder)) is None or not live.engines:
        await anyio.sleep(0.02)
    async with connect(live.redis, live.run, create=False) as connection:
        yield connection


async def status_of(connection: RunConnection) -> RunStatus | None:
    """Return the run's status; None while no role has started."""
    try:
        return await read_status(connection)
    except PenstockError:
        return None


def count_ended(status: RunStatus) -> int:
    """Return the number of prompts that have ended."""
    return status.prompt_counts["trained"] + status.prompt_counts["dropped"] + status.prompt_counts["dead"]


async def wait_ended(connection: RunConnection, prompts: float) -> None:
    """Wait until this many prompts have ended."""
    while (status := await status_of(connection)) is None or count_ended(status) < prompts:
        await connection.wait_for_change("$", 0.5)


def processes(supervisor: int | None = None) -> dict[str, set[int]]:
    """Return role -> pids of the live processes that a supervisor has started; by default the one in this process."""
    result: dict[str, set[int]] = {}
    for child in psutil.Process(supervisor).children():
        if role := _role_of(child):
            result.setdefault(role, set()).add(child.pid)
    return result


def _role_of(process: psutil.Process) -> str | None:
    """Return the role of a process; None if it is dead or has no role."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return None
    if words and words[0].partition(" ")[0].endswith(("redis-server", "valkey-server")):  # it rewrites its command line
        return SERVER
    for place, word in enumerate(words):
        if word == ENGINE_PROGRAM:
            return ENGINE
        if word in (ROLE_PROGRAM, "penstock"):
            return {"serve": ENGINE}.get(words[place + 1], words[place + 1])
    return None


def log_ends(folder: Path) -> str:
    """Return the end of every log of a run, for the message of a failing test."""
    paths = sorted(folder.glob("logs/*.log"))
    return "\n".join(f"== {path.name}\n{path.read_text()[-1500:]}" for path in paths)


def count_events(folder: Path, event: str) -> int:
    """Count how often any process of a run logged `event`."""
    return sum(path.read_text().count(f'"event": "{event}"') for path in folder.glob("logs/*.log"))


def run_parser(description: str, *, groups: int, limit_s: float) -> argparse.ArgumentParser:
    """Return a parser of the options that programs which make one run have in common, with these defaults."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--groups", type=int, default=groups, help="prompts fed")
    parser.add_argument("--limit", type=float, default=limit_s, help="seconds after which the run counts as hanging")
    parser.add_argument(
        "--folder", type=Path, help="a new folder, which stays; else a temporary one, which stays on failure"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON, and no progress")
    return parser


def begin(options: argparse.Namespace, name: str) -> Path:
    """Return the folder for the project of a run; this process logs to the run's folder alone from now on."""
    logs.configure_logging(name, level="critical")
    return (options.folder or Path(tempfile.mkdtemp(prefix=f"penstock-{name}-"))).resolve()


def conclude(
    options: argparse.Namespace, folder: Path, report: dict[str, Any], problem: str, text: str | None = None
) -> int:
    """Print the report; remove a temporary folder if there is no problem. Returns the exit code.

    Args:
        options: of the program.
        folder: of `begin`.
        report: what the run has shown.
        problem: why the run failed; empty: it did not.
        text: the report for people; default: indented JSON.
    """
    print(json.dumps(report) if options.json else text or json.dumps(report, indent=4), flush=True)
    if problem:
        print(f"error: {problem}; the run's folder is {folder}", file=sys.stderr, flush=True)
    elif options.folder is None:
        shutil.rmtree(folder)
    return 1 if problem else 0


def why_unfinished(outcome: RunOutcome | None) -> str:
    """Return why a run did not come to its end; empty: it did."""
    if outcome is None:
        return "the run did not come to its end in time"
    if outcome.failure is not None:
        return str(outcome.failure)
    return "somebody stopped the run" if outcome.interrupted else ""
