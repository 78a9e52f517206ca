"""Check that a long run grows nowhere except by design.

    python tests/hygiene/run.py --groups 100000 --json

Every role is a real process under the project's own supervisor, on a private Redis; the engine is scripted, and the
trainer trains a witness (`tests/chaos/witness.py`). Nothing is killed. During the run these are sampled: the server's
memory, keys, elements and append-only file; each process's memory, open files, threads, tasks and objects; the files
of the run's folder. Prints each quantity's first and last third and its slope; exits with 1 if one grew beyond its
bound (`judge.py`), or the run did not finish. Linux only.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import anyio
import msgspec
from redis.exceptions import RedisError

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from stream.connection.run_connection import RunConnection, connect
from stream.errors import PenstockError
from stream.operator.control import pause, resume
from stream.operator.status import read_status
from tests.hygiene import project
from tests.hygiene.ends import LEAK
from tests.hygiene.judge import judge
from tests.hygiene.samples import Sample, sample_folder, sample_inside, sample_processes, sample_server
from workers.launch.supervisor import RunOutcome, Supervisor
from workers.role import log_setup as logs
from workers.runs.folder import lock_folder, write_settings
from workers.runs.live_run import LiveRun, read_live
from workers.settings import Settings
from workers.terminal.progress import choose_display

SAMPLES = 300
"""Fewest samples of a run; a short run has fewer."""
RESTS = (0.2, 0.45, 0.7)
"""Fractions of the groups at which the run is paused until nothing is in progress, to count the objects that remain."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, sample, judge; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--groups", type=int, default=100_000, help="prompts fed")
    parser.add_argument("--limit", type=float, default=7200.0, help="seconds after which the run counts as hanging")
    parser.add_argument(
        "--leak", type=int, default=0, help="objects that a scorer is to keep of each group, by mistake"
    )
    parser.add_argument("--folder", type=Path, help="a new folder, which stays; else a temporary one")
    parser.add_argument("--json", action="store_true", help="print one line of JSON, and no progress")
    options = parser.parse_args(arguments)
    os.environ.update({"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", LEAK: str(options.leak)})
    folder = options.folder or Path(tempfile.mkdtemp(prefix="penstock-hygiene-"))
    settings = project.write_project(folder.resolve(), options.groups)
    (settings.folder / "logs").mkdir(parents=True)
    samples: list[tuple[int, Sample]] = []
    began = time.monotonic()
    with logs.log_to_file("hygiene", settings.folder / "logs" / "supervisor.log"):
        outcome = _run(settings, samples, options, quiet=options.json)
    seconds = time.monotonic() - began
    at_most = {"folder.archive": project.ARCHIVE_MB * 1e6}
    verdicts = judge(samples, options.groups, at_most)
    ended = _ended(outcome)
    grown = sorted(name for name, verdict in verdicts.items() if not verdict.well)
    report = {"groups": options.groups, "ended": ended, "seconds": round(seconds, 1), "samples": len(samples)}
    report |= {"grown": grown, "quantities": msgspec.to_builtins(verdicts)}
    print(json.dumps(report) if options.json else _table(report), flush=True)
    well = ended == options.groups and not grown and bool(verdicts)
    if not well:
        why = outcome.failure if outcome and outcome.failure else ", ".join(grown) or "the run did not come to its end"
        print(f"error: {why}; the run's folder is {folder}", file=sys.stderr, flush=True)
    elif options.folder is None:
        shutil.rmtree(folder)
    return 0 if well else 1


def _run(
    settings: Settings, samples: list[tuple[int, Sample]], options: argparse.Namespace, *, quiet: bool
) -> RunOutcome | None:
    """Supervise and sample the run; returns None if it did not finish in time."""
    outcomes: list[RunOutcome] = []

    async def supervised() -> None:
        with anyio.move_on_after(options.limit):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_watch, settings.folder, options.groups, samples)
                with choose_display(quiet) as display, project.commands():
                    outcomes.append(await Supervisor(settings, file, display).run())
                tasks.cancel_scope.cancel()

    with lock_folder(settings.folder):
        file = write_settings(settings)
        anyio.run(supervised)
    return outcomes[0] if outcomes else None


async def _watch(folder: Path, groups: int, samples: list[tuple[int, Sample]]) -> None:
    """Take a sample after every 1 / (2 * `SAMPLES`) of the groups, but at most four times a second."""
    live = await _live(folder)
    last, rests = -1, [part * groups for part in RESTS]
    async with connect(live.redis, live.run, create=False) as connection:
        while True:
            await anyio.sleep(0.25)
            try:
                ended, result = await sample_server(connection)
            except (PenstockError, RedisError):  # no role has started, or the server has stopped
                continue
            if ended == last or ended < last + groups / SAMPLES / 2:
                continue
            if rests and ended >= rests[0]:  # at once: a sample takes so long that the run might finish meanwhile
                samples.append(await _at_rest(connection, folder, len(RESTS) + 1 - len(rests)))
                last = rests.pop(0)
            else:
                rest = await anyio.to_thread.run_sync(lambda: {**sample_processes(), **sample_folder(folder)})
                samples.append((ended, {**result, **rest}))
                last = ended
            await anyio.to_thread.run_sync(_note, folder.parent / "samples.jsonl", samples[-1])


async def _at_rest(connection: RunConnection, folder: Path, number: int) -> tuple[int, Sample]:
    """Pause the run until nothing is in progress, collect every role's counts, and resume it."""
    await pause(connection, "hygiene")
    while True:
        status = await read_status(connection)
        busy = (status.stages["prompts"].claimed, status.stages["groups"].depth, status.stages["scored"].lag)
        if not any(busy):
            break
        await connection.wait_for_change("$", 0.2)
    ended = status.prompt_counts["trained"] + status.prompt_counts["dropped"] + status.prompt_counts["dead"]
    while (result := await anyio.to_thread.run_sync(sample_inside, folder, number)) is None:
        await anyio.sleep(0.05)
    with suppress(PenstockError):  # the last groups were trained while the run was paused, so it has finished
        await resume(connection, "hygiene")
    return ended, result


def _note(path: Path, sample: tuple[int, Sample]) -> None:
    """Append a sample to a file, for analysis beyond thirds."""
    with path.open("a") as file:
        file.write(json.dumps(sample) + "\n")


async def _live(folder: Path) -> LiveRun:
    while (live := read_live(folder)) is None or not live.engines:
        await anyio.sleep(0.05)
    return live


def _ended(outcome: RunOutcome | None) -> int:
    """Return the number of prompts that have ended."""
    if outcome is None or outcome.failure is not None or outcome.status is None:
        return 0
    counts = outcome.status.prompt_counts
    return counts["trained"] + counts["dropped"]


def _table(report: dict) -> str:
    lines = [
        f"{report['ended']:,} of {report['groups']:,} groups in {report['seconds']} s, {report['samples']} samples"
    ]
    lines.append(f"{'':24}{'first third':>16}{'last third':>16}{'per 1,000':>14}{'largest':>16}{'may grow by':>16}")
    for name, v in report["quantities"].items():
        allowed = "by design" if v["allowed"] is None else f"{v['allowed']:,.0f}"
        mark = "" if v["well"] else "   GREW"
        numbers = f"{v['first']:16,.0f}{v['last']:16,.0f}{v['per_1000']:14,.1f}{v['largest']:16,.0f}{allowed:>16}"
        lines.append(f"{name:24}{numbers}{mark}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
