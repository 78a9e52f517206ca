"""Time and CPU until a command has answered, a worker has claimed work, and a run has its first group.

    python -m benchmarks.startup [--repeats 5] [--groups 50000] [--dead 10000] [--only import,queues] [--json] [--check]

===========  =========================================================================================
`bare`       `python -c pass`, the floor of every command
`import`     `python -c "import penstock"`
`help`       `penstock --help`
`queues`     `penstock queues` of a run with `--groups` groups that wait to be trained, and `--dead` dead letters
`rollout`    `penstock rollout` with the demo's settings until it has claimed a prompt; its engine answers at once
`run`        `penstock run` with the demo's settings until its first group is rolled out, engine and trainer included
===========  =========================================================================================

Wall time, and CPU time (user and system) of the process and its children, each the least of the repeats: other
processes of the machine add to both, to wall time without bound. `ratio` is CPU time in multiples of `bare`. Files are
in the disk cache. `--check` exits with 1 if wall time exceeds a limit.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import psutil
import structlog
from msgspec import Struct, structs
from redis.asyncio import Redis
from redis.exceptions import RedisError

from stream.connection.run_connection import RunConnection, connect
from stream.private_server import private_server
from stream.queue.feed import Feed
from stream.queue.lease import Lease
from stream.queue.stage import RetryPolicy, Stage
from stream.records import Completion, Group, Prompt
from stream.validity import Measured
from tests.scripted_engine.engine import ScriptedEngine

LIMITS_MS = {"import": 100.0, "help": 150.0, "queues": 400.0, "rollout": 1500.0, "run": 15_000.0}
PENSTOCK = (sys.executable, "-P", "-m", "penstock")
POLL_S = 0.01
TIMEOUT_S = 120.0
AT_ONCE = 250
_UNLIMITED = 1_000_000
"""Bound on claimed and waiting groups that never holds a claim back."""


class Cost(Struct):
    """What a start took, in milliseconds."""

    wall_ms: float
    cpu_ms: float

    @classmethod
    def least(cls, costs: list["Cost"]) -> "Cost":
        """Return the least of each."""
        return cls(min(cost.wall_ms for cost in costs), min(cost.cpu_ms for cost in costs))


def measure_command(*command: str) -> Cost:
    """Run a command to its end."""
    with tempfile.TemporaryFile() as output:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=output)
        _, status, usage = os.wait4(process.pid, 0)
        wall_ms = 1000 * (time.perf_counter() - began)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        assert process.returncode == 0, output.read().decode()
    return Cost(wall_ms, 1000 * (usage.ru_utime + usage.ru_stime))


async def measure_until(has_arrived: Callable[[], Awaitable[bool]], *command: str) -> Cost:
    """Start a command, wait until something is the case, and end the command."""
    with tempfile.TemporaryFile() as log:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)  # noqa: ASYNC220
        try:
            with anyio.fail_after(TIMEOUT_S):
                while not await has_arrived():
                    log.seek(0)
                    assert process.poll() is None, log.read().decode()
                    await anyio.sleep(POLL_S)
            wall_ms = 1000 * (time.perf_counter() - began)
            return Cost(wall_ms, 1000 * cpu_seconds(psutil.Process(process.pid)))
        finally:
            process.send_signal(signal.SIGTERM)
            await anyio.to_thread.run_sync(process.wait)


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU time of a process and its descendants until now."""
    total = 0.0
    for each in (process, *process.children(recursive=True)):
        total += sum(each.cpu_times()[:4])  # user and system, own and of children that have ended
    return total


@asynccontextmanager
async def waiting_prompts(folder: Path, count: int) -> AsyncIterator[tuple[RunConnection, str]]:
    """Start a server with prompts that wait to be rolled out; yield a connection and the server's URL."""
    problem = json.loads((folder / "runs/d/prompts.jsonl").read_text().partition("\n")[0])
    columns = {name: value for name, value in problem.items() if name != "prompt"}
    async with (
        private_server(Path(tempfile.mkdtemp(dir=folder)), fsync="no") as url,
        connect(url, "d") as connection,
    ):
        feed = Feed(connection, max_queued_prompts=count)
        for start in range(0, count, AT_ONCE):
            prompts = [
                Prompt(
                    id=f"p{number}",
                    messages=problem["prompt"],
                    environment="calculator",
                    fields=columns,
                    group_size=8,
                )
                for number in range(start, min(start + AT_ONCE, count))
            ]
            await feed.put(prompts, str(start or ""), str(start + AT_ONCE))
        yield connection, url


async def end_prompts(connection: RunConnection, count: int, end: Callable[[Stage, Lease], Awaitable[object]]) -> None:
    """Claim that many prompts, and end each with `end`."""
    stage = Stage(connection, "prompts", "worker", RetryPolicy(lease_s=600), _UNLIMITED)
    while count > 0:
        leases = (await stage.claim(min(count, AT_ONCE))).leases
        count -= len(leases)
        async with anyio.create_task_group() as tasks:
            for lease in leases:
                tasks.start_soon(end, stage, lease)


async def move_to_trainer(connection: RunConnection, count: int) -> None:
    """Complete prompts as small groups that wait to be trained."""

    async def complete(stage: Stage, lease: Lease) -> None:
        completions = [Completion(index=0, rows=[], reward=Measured(1.0))]
        await stage.complete(lease, "scored", Group(prompt=lease.prompt(), completions=completions))

    await end_prompts(connection, count, complete)


async def dead_letter(connection: RunConnection, count: int) -> None:
    """Make dead letters of prompts."""
    await end_prompts(
        connection, count, lambda stage, lease: stage.dead_letter(lease, "data", "the row does not render")
    )


async def measure_queues(folder: Path, repeats: int, groups: int, dead: int) -> list[Cost]:
    """Measure `penstock queues` of a run with that many groups waiting, and that many dead letters."""
    async with waiting_prompts(folder, groups + dead) as (connection, url):
        await dead_letter(connection, dead)
        await move_to_trainer(connection, groups)
        command = (*PENSTOCK, "queues", str(folder / "runs/d"), "--redis", url)
        return [await anyio.to_thread.run_sync(measure_command, *command) for _ in range(repeats)]


async def measure_rollout(folder: Path, repeats: int) -> list[Cost]:
    """Measure a rollout worker until it has claimed a prompt."""

    async def once(engine: ScriptedEngine) -> Cost:
        async with waiting_prompts(folder, AT_ONCE) as (connection, url):

            async def has_claimed() -> bool:
                return bool(await connection.redis.zcard(connection.key("prompts:leases")))

            file = str(folder / "runs/d/run.toml")
            return await measure_until(has_claimed, *PENSTOCK, "rollout", file, "--redis", url, "--engine", engine.url)

    async with ScriptedEngine(lambda _ids, _request: [2], version="0") as engine:
        return [await once(engine) for _ in range(repeats)]


async def measure_run(folder: Path, repeats: int) -> list[Cost]:
    """Measure a run until its first group is rolled out."""

    async def once(name: str) -> Cost:
        run = folder / name

        async def has_group() -> bool:
            try:
                url = json.loads((run / "live.json").read_text())["redis"]
                async with Redis.from_url(url) as server:
                    return bool((await server.xinfo_stream(f"{{{name}}}:groups"))["entries-added"])
            except (FileNotFoundError, RedisError):
                return False

        own = ("--set", f"run.name={name}", "--set", f"run.folder={run}")
        return await measure_until(
            has_group, *PENSTOCK, "run", str(folder / "runs/d/run.toml"), "--no-check", "--quiet", *own
        )

    return [await once(f"r{number}") for number in range(repeats)]


async def measure(names: list[str], repeats: int, groups: int, dead: int) -> dict[str, dict[str, float]]:
    """Measure the starts of these names."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare = (*PENSTOCK, "demo", "--prepare", "--folder", str(folder / "runs/d"))
        await anyio.to_thread.run_sync(measure_command, *prepare)
        bare = Cost.least([measure_command(sys.executable, "-c", "pass") for _ in range(3 * repeats)])
        found = {"bare": bare}
        if "import" in names:
            costs = [measure_command(sys.executable, "-P", "-c", "import penstock") for _ in range(3 * repeats)]
            found["import"] = Cost.least(costs)
        if "help" in names:
            found["help"] = Cost.least([measure_command(*PENSTOCK, "--help") for _ in range(repeats)])
        if "queues" in names:
            found["queues"] = Cost.least(await measure_queues(folder, repeats, groups, dead))
        if "rollout" in names:
            found["rollout"] = Cost.least(await measure_rollout(folder, repeats))
        if "run" in names:
            found["run"] = Cost.least(await measure_run(folder, max(1, repeats // 2)))
    return {
        name: {
            **{key: round(value, 1) for key, value in structs.asdict(cost).items()},
            "ratio": round(cost.cpu_ms / bare.cpu_ms, 1),
        }
        for name, cost in found.items()
    }


def main() -> None:
    """Measure, print, and check the limits with `--check`."""
    parser = argparse.ArgumentParser(description="How long commands, a worker and a run take to start")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--groups", type=int, default=50_000)
    parser.add_argument("--dead", type=int, default=10_000)
    parser.add_argument("--only", default=",".join(LIMITS_MS))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("error"))
    arguments = parser.parse_args()
    found = anyio.run(measure, arguments.only.split(","), arguments.repeats, arguments.groups, arguments.dead)
    if arguments.json:
        print(json.dumps(found))
    else:
        for name, cost in found.items():
            print(f"{name:8} wall {cost['wall_ms']:7.0f} ms   CPU {cost['cpu_ms']:7.0f} ms   x{cost['ratio']:g}")
    slow = [name for name, limit in LIMITS_MS.items() if name in found and found[name]["wall_ms"] > limit]
    if arguments.check and slow:
        print(f"slower than their limits: {', '.join(slow)}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
