"""One role of a hygiene run: `role.py ROLE FILE --redis URL --engine URL`; tells of what can be seen from inside alone.

That is the number of tasks on its event loop, and of objects that the garbage collector knows, written to
`RUN/inside/PID.json` whenever somebody writes another number to `RUN/inside/ask`.
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

from workers.run.role_process import run_role
from workers.run.run_folder import write_atomically
from workers.runtime.context import RoleMain, WorkerContext

EVERY_S = 0.25
ASK = "ask"
"""A file beside those that the roles write: a number, which they repeat with what they have counted."""


def watched(main: RoleMain) -> RoleMain:
    """The role, with somebody who counts beside it."""

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
            told = {"asked": int(asked), "tasks": len(asyncio.all_tasks()), "objects": len(gc.get_objects())}
            await anyio.to_thread.run_sync(_tell, folder, told)


def _asked(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def _tell(folder: Path, told: dict[str, int]) -> None:
    folder.mkdir(exist_ok=True)
    target = folder / f"{os.getpid()}.json"
    write_atomically(target, json.dumps(told).encode())


def main_of(role: str) -> RoleMain:
    """The project's own role; the trainer's with a witness in the learner's place."""
    if role == "train":
        from tests.chaos.witness import Witness
        from workers.train.worker import train

        return partial(train, make_learner=Witness)
    from workers.run.role_process import _role_main

    return _role_main(role)


def main() -> int:
    """Run the role to its end; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role")
    parser.add_argument("file", type=Path)
    parser.add_argument("--redis", required=True)
    parser.add_argument("--engine", action="append", required=True)
    options = parser.parse_args()
    found = watched(main_of(options.role))
    return run_role(options.role, options.file, (), options.redis, tuple(options.engine), found)


if __name__ == "__main__":
    sys.exit(main())
