"""One role of a soak run as a separate process: `role.py ROLE [OPTIONS] FILE --redis URL --engine URL`.

A trainer's learner is a witness (`witness.py`). With `--counted` the role reports its internal counts: the number of
tasks on the event loop and of objects known to the garbage collector. It writes them to `RUN/inside/PID.json` whenever
the number in `RUN/inside/ask` changes.
"""

import argparse
import asyncio
import gc
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from stream.durable import write_file_atomically
from workers.launch.role_process import ROLE_MAINS, run_role
from workers.role.context import RoleMain, WorkerContext

INSIDE, ASK = "inside", "ask"
"""Folder of the reports in the run's folder, and the file in it: a number, which each role repeats in its report."""
PATIENT_ATTEMPTS = 1000
_EVERY_S = 0.25
_LOOKS = 5
"""Counts of tasks and objects for one answer, `_EVERY_S` apart."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the role; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("feed", "rollout", "score", "train"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--redis", default="")
    parser.add_argument("--engine", action="append", default=[])  # the first roles start before an engine listens
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--learner", default="Witness", help="of a trainer: a class of witness.py")
    parser.add_argument("--trainer-wait", type=float, help="seconds for which a trainer waits for an evaluation")
    parser.add_argument("--patient", action="store_true", help="a rollout worker repeats a request until it succeeds")
    parser.add_argument("--counted", action="store_true", help="report internal counts")
    options = parser.parse_args(arguments)
    role_main = _main_of(options)
    if options.counted:
        role_main = _counted(role_main)
    ROLE_MAINS[options.role] = lambda: role_main
    overrides, engines = tuple(options.overrides), tuple(options.engine)
    return run_role(options.role, options.file, overrides, options.redis, engines)


def _main_of(options: Any) -> RoleMain:
    """Return the project's own role, with what the options change of it."""
    if options.trainer_wait is not None:
        from workers.settings import AbortSettings

        AbortSettings.trainer_wait_s = options.trainer_wait
    if options.patient:
        from workers.rollout.engine_client import client

        client.MAX_ATTEMPTS = PATIENT_ATTEMPTS
    if options.role == "train":
        from tests.soak import witness
        from workers.train.worker import train

        return partial(train, make_learner=getattr(witness, options.learner))
    return ROLE_MAINS[options.role]()


def _counted(role_main: RoleMain) -> RoleMain:
    """Return the role's main function with a counter task beside it."""

    async def both(role: WorkerContext) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_count, role.settings.folder / INSIDE)
            await role_main(role)
            tasks.cancel_scope.cancel()

    return both


async def _count(folder: Path) -> None:
    answered = ""
    while True:
        await anyio.sleep(_EVERY_S)
        asked = await anyio.to_thread.run_sync(_read_asked, folder / ASK)
        if asked != answered:
            answered = asked
            counts = {"asked": int(asked), **await _count_what_stays()}
            await anyio.to_thread.run_sync(_write_counts, folder, counts)


async def _count_what_stays() -> dict[str, int]:
    """Return the least numbers of tasks and objects of some looks.

    A trainer may still be in a step when all else is at rest. What it needs for that goes; what is kept stays.
    """
    looks = []
    for _ in range(_LOOKS):
        gc.collect()
        looks.append((len(asyncio.all_tasks()), len(gc.get_objects())))
        await anyio.sleep(_EVERY_S)
    return {"tasks": min(tasks for tasks, _ in looks), "objects": min(objects for _, objects in looks)}


def _read_asked(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def _write_counts(folder: Path, counts: dict[str, int]) -> None:
    folder.mkdir(exist_ok=True)
    write_file_atomically(folder / f"{os.getpid()}.json", json.dumps(counts).encode())


if __name__ == "__main__":
    sys.exit(main())
