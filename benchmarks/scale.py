"""Rollout workers side by side: groups per CPU-second of the workers and Redis together, with 1 to 8 workers.

    python -m benchmarks.scale [--points 1x1 2x1 4x2 8x4] [--rounds 3] [--engine-ms 200] [--json] [--check]

A point `8x4` is 8 `penstock rollout` processes, each using 4 engines, on one run of a private server on a unix socket.
The case is that of `benchmarks/rollout.py`: groups of 8, prompts of about 490 tokens, two turns with a tool call and
one without. An engine answers each turn after exactly `--engine-ms`, from prepared bytes.

Each worker has the same load at every point (`--concurrency` completions in flight): 8 workers do 8 times the work of
one. The engine is paced so that 8 of them need less than the machine's CPUs: on two cores a worker with 50 ms turns
would saturate them, and the benchmark would measure the cores. `busy` is the share of all CPUs that was in use, by
whatever process; above 0.9 the figures say nothing.

`floor` is the same requests by as many processes of `benchmarks/rollout_floor.py`, which share nothing: what they lose
from the first point to the last, the machine loses (its caches, and CPUs that other processes use too).

The points take turns: while one runs, the workers of the others are suspended, in `--rounds` rounds. CPU seconds
are counted for the workers, threads included, and for the server's process, but not for its forks.
`--check` exits with 1 if the last point does less than 90 % of the first point's groups per CPU-second.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import psutil
import structlog
from msgspec import Struct, field

from benchmarks.rollout import (
    CONVERSATIONS,
    ROOT,
    SETTLE_S,
    answered,
    feed,
    first_line,
    process,
    write_case,
    write_settings,
)
from benchmarks.rollout_case import GROUP, conversations, make_case
from stream.connection.run_connection import connect
from stream.private_server import private_server

LIMIT = 0.9


class Round(Struct):
    """One window of one point; CPU in seconds."""

    groups: float
    """Turns that the engines answered, by the turns of a group: a window has few groups, and their ends jump."""
    wall_s: float
    worker_cpu_s: float
    redis_cpu_s: float
    busy: float

    @property
    def groups_per_cpu_s(self) -> float:
        return self.groups / (self.worker_cpu_s + self.redis_cpu_s)


class Setup(Struct):
    """What all points share."""

    folder: Path
    case_file: Path
    settings: Path
    redis_url: str
    redis: psutil.Process
    engines: list[str]
    turns_per_group: int
    concurrency: int

    async def groups(self) -> float:
        """Return how many groups' turns the engines have answered."""
        return sum([await answered(url) for url in self.engines]) / self.turns_per_group


class Point(Struct):
    """Processes side by side; suspended except while they are measured."""

    workers: int
    engines: int
    is_floor: bool = False
    processes: list[psutil.Process] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{'floor-' if self.is_floor else ''}{self.workers}x{self.engines}"

    def command(self, setup: Setup, number: int) -> tuple[str, ...]:
        """Return the command of one of the processes."""
        urls = setup.engines[: self.engines]
        if self.is_floor:
            load = ("--engine", urls[number % len(urls)], "--concurrency", str(setup.concurrency))
            return (sys.executable, "-m", "benchmarks.rollout_floor", str(setup.case_file), *load)
        engines = [part for url in urls for part in ("--engine", url)]
        own = ("--set", f"run.name={self.name}", "--set", f"run.folder={setup.folder / self.name}")
        worker = (sys.executable, "-m", "penstock", "rollout", str(setup.settings), "--redis", setup.redis_url)
        return (*worker, *engines, *own)

    async def start(self, stack: AsyncExitStack, setup: Setup) -> None:
        """Start the processes one after the other, wait until each samples, and suspend them."""
        for number in range(self.workers):
            before = await setup.groups()
            log = stack.enter_context((setup.folder / f"{self.name}.log").open("a"))
            started = await stack.enter_async_context(process(*self.command(setup, number), cwd=ROOT, log=log))
            self.processes.append(psutil.Process(started.pid))
            with anyio.fail_after(120):
                while await setup.groups() < before + 2:  # noqa: ASYNC110  (other processes)
                    await anyio.sleep(0.1)
            self.send(signal.SIGSTOP)

    def send(self, number: signal.Signals) -> None:
        for each in self.processes:
            each.send_signal(number)

    async def measure(self, setup: Setup, seconds: float) -> None:
        """Run for so long, and add a round."""
        self.send(signal.SIGCONT)
        await anyio.sleep(SETTLE_S)
        psutil.cpu_percent()
        began, cpu, redis_cpu = anyio.current_time(), cpu_s(*self.processes), cpu_s(setup.redis)
        before = await setup.groups()
        await anyio.sleep(seconds)
        made = await setup.groups() - before
        result = Round(
            groups=made,
            wall_s=anyio.current_time() - began,
            worker_cpu_s=cpu_s(*self.processes) - cpu,
            redis_cpu_s=0.0 if self.is_floor else cpu_s(setup.redis) - redis_cpu,
            busy=psutil.cpu_percent() / 100,
        )
        self.send(signal.SIGSTOP)
        self.rounds.append(result)

    def figures(self) -> dict[str, float]:
        """Return the medians of the rounds."""

        def median(value: Any) -> float:
            return round(statistics.median(value(each) for each in self.rounds), 3)

        figures = {
            "groups_per_cpu_s": median(lambda each: each.groups_per_cpu_s),
            "groups_per_s": median(lambda each: each.groups / each.wall_s),
            "worker_ms_per_group": median(lambda each: 1e3 * each.worker_cpu_s / each.groups),
            "busy": median(lambda each: each.busy),
        }
        if self.is_floor:
            return figures
        return figures | {
            "redis_ms_per_group": median(lambda each: 1e3 * each.redis_cpu_s / each.groups),
            "redis_share_of_a_core": median(lambda each: each.redis_cpu_s / each.wall_s),
        }


def cpu_s(*processes: psutil.Process) -> float:
    """Return the CPU seconds that processes have used, threads included and children not."""
    return sum(times.user + times.system for times in (each.cpu_times() for each in processes))


async def require_groups(setup: Setup, points: list[Point]) -> None:
    """Require that workers have completed groups into the streams of their runs."""
    for point in points:
        async with connect(setup.redis_url, point.name) as connection:
            if not await connection.redis.xlen(connection.key("groups")):
                raise SystemExit(f"{point.name} completed no group")


@asynccontextmanager
async def prepared(stack: AsyncExitStack, arguments: argparse.Namespace, points: list[Point]) -> AsyncIterator[Setup]:
    """Start engines and server, and keep a backlog of prompts for each run."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-scale-")))
    case, tokenizer = make_case(folder, tool_turns=2, tokens=64)
    messages = conversations(tokenizer, CONVERSATIONS)
    file, settings = write_case(case, messages), write_settings(case, arguments.concurrency)
    settings.write_text(settings.read_text() + "\n[queue]\nlease_s = 3600.0\n")  # suspended workers keep theirs
    server = (sys.executable, "-m", "benchmarks.rollout_server", str(file), "--delay-ms", str(arguments.engine_ms))
    urls = []
    for _ in range(max(point.engines for point in points)):
        urls.append(await first_line(await stack.enter_async_context(process(*server))))  # noqa: PERF401
    redis_url = await stack.enter_async_context(private_server(folder))
    async with connect(redis_url, "scale", create=False) as connection:
        redis = psutil.Process((await connection.redis.info("server"))["process_id"])
    setup = Setup(folder, file, settings, redis_url, redis, urls, GROUP * len(case.turns), arguments.concurrency)
    async with anyio.create_task_group() as tasks:
        for point in points:
            if not point.is_floor:
                tasks.start_soon(feed, redis_url, point.name, messages)
        yield setup
        tasks.cancel_scope.cancel()


async def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start all points, and measure them in turns."""
    ours = [Point(*map(int, each.split("x"))) for each in arguments.points]
    points = [*ours, *(Point(each.workers, each.engines, is_floor=True) for each in (ours[0], ours[-1]))]
    async with AsyncExitStack() as stack, prepared(stack, arguments, points) as setup:
        for point in points:
            await point.start(stack, setup)
        for _ in range(arguments.rounds):
            for point in points:
                await point.measure(setup, arguments.seconds)
        await require_groups(setup, ours)
        used = [await answered(url) for url in setup.engines]
    return {
        "cores": os.cpu_count(),
        "points": {point.name: point.figures() for point in points},
        "last_by_first": compare(ours[-1], ours[0]),
        "floor_last_by_first": compare(points[-1], points[-2]),
        "turns_by_engine": used,
    }


def compare(last: Point, first: Point) -> dict[str, Any]:
    """Return the ratio of groups per CPU-second, and its range over the rounds."""
    ratios = [
        mine.groups_per_cpu_s / theirs.groups_per_cpu_s for mine, theirs in zip(last.rounds, first.rounds, strict=True)
    ]
    return {"ratio": round(statistics.median(ratios), 3), "spread": [round(min(ratios), 3), round(max(ratios), 3)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", nargs="+", default=["1x1", "2x1", "4x2", "8x4"], metavar="WORKERSxENGINES")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each point in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=16, help="completions in flight of each worker")
    parser.add_argument("--engine-ms", type=float, default=200.0, help="time of a turn")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    result = anyio.run(bench, arguments, backend_options={"use_uvloop": True})
    if arguments.json:
        print(json.dumps(result))
    else:
        for name, figures in result["points"].items():
            print(f"{name:10} {figures}")
        print({name: value for name, value in result.items() if name != "points"})
    ratio = result["last_by_first"]["ratio"]
    if arguments.check and ratio < LIMIT:
        print(f"{ratio:.3f} of one worker's groups per CPU-second; the limit is {LIMIT}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
