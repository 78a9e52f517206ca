"""Processes of the runs that `pipeline.py` measures.

===================================================  ================================================================
`engine --port PORT --seconds S --slots N`           answers each request after S seconds, N at a time
`trainer FILE --redis URL --engine URL --seconds S`  the trainer without a model; a step takes S seconds
`paced-engine FILE --port PORT --seconds S`          the local engine; a decode step takes at least S seconds
`paced-trainer FILE --redis URL ... --seconds S`     the trainer; a step takes at least S seconds
===================================================  ================================================================
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from workers.launch.process import run_async

END = 10
"""Token that ends a completion of the scripted engine."""
LENGTH = 8


async def serve_scripted(port: int, seconds: float, slots: int) -> None:
    """Answer each request after the given seconds. Only `slots` requests run at a time; others wait."""
    from tests.scripted_engine.engine import ScriptedEngine

    reply = [0] * (LENGTH - 1) + [END]
    async with ScriptedEngine(lambda *_: reply, delay_s=seconds, max_concurrency=slots, port=port) as engine:
        print(f"listening on {engine.url}", flush=True)
        await anyio.sleep_forever()


async def serve_paced(file: Path, port: int, seconds: float) -> None:
    """Serve the settings' model with the local engine; each decode step takes at least the given number of seconds."""
    from workers.launch.serve import choose_server
    from workers.local_engine import local_server
    from workers.local_engine.scheduler import Scheduler

    class PacedScheduler(Scheduler):
        """Sleeps at the end of a step for what a model elsewhere would still compute."""

        def _generate(self) -> None:
            began = time.perf_counter()
            super()._generate()
            if self._running or self._finished:
                time.sleep(max(0.0, began + seconds - time.perf_counter()))

    local_server.Scheduler = PacedScheduler  # type: ignore[attr-defined]
    serve = choose_server(file, (), "generate", "", "127.0.0.1")
    await serve(port=port, ready=lambda url: print(f"listening on {url}", flush=True))


def paced(step: Any, seconds: float) -> Any:
    """Make a learner whose step takes at least the given number of seconds."""

    def padded(*arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        report = step(*arguments, **named)
        time.sleep(max(0.0, began + seconds - time.perf_counter()))
        report.metrics["seconds"] = time.perf_counter() - began
        return report

    return padded


def make_learner(settings: Any, *, seconds: float, has_model: bool) -> Any:
    """Make the trainer's learner, or one without a model, with padded steps."""
    if has_model:
        from workers.train.step.learner import Learner

        learner: Any = Learner(settings)
    else:
        from tests.soak.witness import Witness

        learner = Witness(settings)
    learner.step = paced(learner.step, seconds)
    return learner


def main() -> int:
    """Run one of them; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=("engine", "trainer", "paced-engine", "paced-trainer"))
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--redis", default="")
    parser.add_argument("--engine", action="append", default=[])
    given = parser.parse_args()
    if given.role == "engine":
        run_async(partial(serve_scripted, given.port, given.seconds, given.slots))
        return 0
    if given.role == "paced-engine":
        run_async(partial(serve_paced, given.file, given.port, given.seconds))
        return 0
    from workers.launch.role_process import ROLE_MAINS, run_role
    from workers.train.worker import train

    learner = partial(make_learner, seconds=given.seconds, has_model=given.role == "paced-trainer")
    ROLE_MAINS["train"] = lambda: partial(train, make_learner=learner)
    return run_role("train", given.file, (), given.redis, tuple(given.engine))


if __name__ == "__main__":
    sys.exit(main())
