"""Run one role of a hygiene run and report its internal counts: `role.py ROLE FILE --redis URL --engine URL`.

The report holds the number of tasks on the event loop and of objects known to the garbage collector. It is written to
`RUN/inside/PID.json` whenever the number in `RUN/inside/ask` changes.
"""

import argparse
import asyncio
import gc
import json
import os
import sys
from functools import partial
from pathlib import Path

import anyio

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from stream.durable import write_file_atomically
from workers.launch.role_process import ROLE_MAINS, run_role
from workers.role.context import RoleMain, WorkerContext

EVERY_S = 0.25
ASK = "ask"
"""File in the folder of the reports: a number, which each role repeats in its report."""


def watched(main: RoleMain) -> RoleMain:
    """Return the role's main function with a counter task beside it."""

    async def both(role: WorkerContext) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_count, role.settings.folder / "inside")
            await main(role)
            tasks.cancel_scope.cancel()

    return both


async def _count(folder: Path) -> None:
    answered = ""
    while True:
        await anyio.sleep(EVERY_S)
        asked = await anyio.to_thread.run_sync(_asked, folder / ASK)
        if asked != answered:
            answered = asked
            gc.collect()
            counts = {"asked": int(asked), "tasks": len(asyncio.all_tasks()), "objects": len(gc.get_objects())}
            await anyio.to_thread.run_sync(_tell, folder, counts)


def _asked(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def _tell(folder: Path, counts: dict[str, int]) -> None:
    folder.mkdir(exist_ok=True)
    target = folder / f"{os.getpid()}.json"
    write_file_atomically(target, json.dumps(counts).encode())


def main_of(role: str) -> RoleMain:
    """Return the project's own role; the trainer's learner is a witness."""
    if role == "train":
        from tests.chaos.witness import Witness
        from workers.train.worker import train

        return partial(train, make_learner=Witness)
    return ROLE_MAINS[role]()


def main() -> int:
    """Run the role; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role")
    parser.add_argument("file", type=Path)
    parser.add_argument("--redis", default="")
    parser.add_argument("--engine", action="append", default=[])  # the first roles start before an engine listens
    options = parser.parse_args()
    role_main = watched(main_of(options.role))
    ROLE_MAINS[options.role] = lambda: role_main
    return run_role(options.role, options.file, (), options.redis, tuple(options.engine))


if __name__ == "__main__":
    sys.exit(main())
