"""Clients of a real engine that are killed at every moment: what they leave is removed, or adopted exactly once."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from envs.sandboxes.contract import FailureKind, SandboxFailure

pytestmark = [pytest.mark.sandboxes, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
LATE_CREATE_S = 12
"""A container that an engine was asked for has appeared by then, though its client is dead."""


@contextmanager
def client(engine_address, *words):
    command = [sys.executable, "-m", "tests.cases.sandbox_client", *words]
    environment = {**os.environ, "DOCKER_HOST": engine_address, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as process:
        try:
            yield process
        finally:
            process.kill()


def killed_at(engine_address, words, line, after_s):
    with client(engine_address, *words) as process:
        while process.stdout.readline().strip() not in (line, ""):
            pass
        time.sleep(after_s)
        process.send_signal(signal.SIGKILL)


async def remove_all(provider, names, run_id):
    """Remove by name as the reaper does: a removal that finds nothing is repeated, until no creation can be late."""
    deadline = anyio.current_time() + LATE_CREATE_S
    waiting = set(names)
    while waiting and anyio.current_time() < deadline:
        waiting -= {name for name in waiting if await provider.remove(name)}
        await anyio.sleep(0.5)
    return await provider.list(run_id)


@pytest.mark.parametrize("kills", [6, pytest.param(30, marks=pytest.mark.full)])
async def test_a_killed_client_leaves_nothing_that_its_name_does_not_remove(kills, place, engine_address):
    """Kills during create, start, exec and remove, two clients at a time."""
    moments = random.Random(1)
    names = [place.name() for _ in range(kills)]
    limit = anyio.CapacityLimiter(2)

    async def kill(number, name):
        line = ("creating", "running", "removing")[number % 3]
        words = (name, place.run_id, "call", "sleep 1")
        after_s = moments.uniform(0, 0.8 if line == "creating" else 0.3)
        await to_thread.run_sync(killed_at, engine_address, words, line, after_s, limiter=limit)

    async with anyio.create_task_group() as tasks:
        for number, name in enumerate(names):
            tasks.start_soon(kill, number, name)
    assert await remove_all(place.provider, names, place.run_id) == []


@pytest.mark.parametrize("kills", [3, pytest.param(25, marks=pytest.mark.full)])
async def test_a_call_of_a_killed_client_happens_once_and_its_successor_has_the_result(kills, place, engine_address):
    moments = random.Random(2)
    for number in range(kills):
        name, call = place.name(), f"call-{number}"
        script = "echo effect >>/tmp/effects; sleep 1; echo done; exit 4"
        words = (name, place.run_id, call, script)
        await to_thread.run_sync(killed_at, engine_address, words, "running", moments.uniform(0.1, 0.9))
        successor = await place.provider.attach(name, place.spec(), fence=2)
        result = await successor.exec(["sh", "-c", script], id=call, timeout_s=20)
        assert (result.code, result.stdout) == (4, b"done\n")
        assert await successor.read("/tmp/effects", 100) == b"effect\n"
        await place.provider.remove(name)


async def test_the_former_owner_is_refused_and_may_not_come_back(place, sh):
    first = await place.create()
    second = await place.provider.attach(first.name, first.spec, fence=2)
    for call in (sh(first, "touch /tmp/effect"), place.provider.attach(first.name, first.spec, fence=1)):
        with pytest.raises(SandboxFailure) as caught:
            await call
        assert caught.value.kind == FailureKind.FENCED
    assert (await sh(second, "ls /tmp")).stdout == b""
