"""A worker without work waits without polling."""

import time
from pathlib import Path

import anyio
import pytest

from stream.connection.run_connection import connect
from tests.e2e.harness import environment
from tests.preload.fixtures import pid_of
from tests.scripted_engine.engine import ScriptedEngine

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("preloaded")]

WATCHED_S = 6.0


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


async def test_idle_workers_use_under_one_percent_of_a_core(project, redis_url, run_name):
    project.table["run"]["name"] = run_name
    file = str(await anyio.to_thread.run_sync(project.write))
    async with ScriptedEngine(lambda ids, request: ids[:1], version="0") as engine:
        commands = [
            project.command("score", file, "--redis", redis_url),
            project.command("rollout", file, "--redis", redis_url, "--engine", engine.url),
        ]
        processes = [await anyio.open_process(c, env=environment(), stdout=None, stderr=None) for c in commands]
        try:
            with anyio.fail_after(40):
                async with connect(redis_url, run_name) as connection:
                    while await waiting(connection) < len(processes):
                        await anyio.sleep(0.2)
            await anyio.sleep(1.0)
            began, before = time.monotonic(), [cpu_seconds(pid_of(p.pid)) for p in processes]
            await anyio.sleep(WATCHED_S)
            took = time.monotonic() - began
            used = [(cpu_seconds(pid_of(p.pid)) - b) / took for p, b in zip(processes, before, strict=True)]
            assert max(used) < 0.01, used
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                await process.wait()
                await process.aclose()


async def waiting(connection) -> int:
    """Count the workers blocked on this run's wake stream."""
    clients = await connection.redis.client_list()
    return sum(client["cmd"] == "xread" and "b" in client["flags"] for client in clients)
