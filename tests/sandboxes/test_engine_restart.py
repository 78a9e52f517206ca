"""An engine that is killed, stopped and suspended under its sandboxes. It has to be the one of `engine.sh`."""

import os
import signal
import subprocess
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from envs.sandboxes.contract import FailureKind, ProviderOptions, SandboxFailure
from envs.sandboxes.docker import DockerProvider

pytestmark = [pytest.mark.sandboxes, pytest.mark.timeout(240)]

SCRIPT = Path(__file__).with_name("engine.sh")
FOLDER = Path(__file__).parents[2] / ".cache" / "engine"


@pytest.fixture(autouse=True)
def own_engine(engine_address):
    if engine_address != f"unix://{FOLDER}/docker.sock":
        pytest.skip(f"the engine at {engine_address} is not ours to restart: start one with {SCRIPT.name}")
    yield
    subprocess.run(["sh", SCRIPT, "start"], check=True)


async def engine(word):
    await to_thread.run_sync(lambda: subprocess.run(["sh", SCRIPT, word], check=True))


def pid() -> int:
    return int((FOLDER / "docker.pid").read_text())


@pytest.mark.parametrize("word", ["kill", pytest.param("stop", marks=pytest.mark.full)])
async def test_a_sandbox_whose_engine_was_restarted_is_lost_and_can_be_removed(word, place, sh):
    sandbox = await place.create()
    failures = []

    async def call():
        with pytest.raises(SandboxFailure) as caught:
            await sh(sandbox, "sleep 100", timeout_s=120.0)
        failures.append(caught.value)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        await anyio.sleep(1)
        await engine(word)
        await engine("start")
    assert failures[0].kind == FailureKind.LOST, failures
    assert [one.name for one in await place.provider.list(place.run_id)] == [sandbox.name]
    assert await place.provider.remove(sandbox.name)
    assert await place.provider.list(place.run_id) == []


async def test_an_engine_that_is_suspended_for_a_while_costs_time_and_no_effect(place, sh):
    sandbox = await place.create()
    results = []

    async def call():
        results.append(await sh(sandbox, "echo effect >>/tmp/effects; sleep 1; echo done", id="call"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        await anyio.sleep(0.5)
        os.kill(pid(), signal.SIGSTOP)
        await anyio.sleep(3)
        os.kill(pid(), signal.SIGCONT)
    assert results[0].stdout == b"done\n"
    assert await sandbox.read("/tmp/effects", 100) == b"effect\n"


@pytest.mark.full
async def test_an_engine_that_is_away_is_unreachable_after_the_deadline(place, sh, engine_address):
    created = await place.create()
    async with DockerProvider(ProviderOptions(address=engine_address, call_timeout_s=2.0)) as provider:
        sandbox = await provider.attach(created.name, created.spec, 2)
        await engine("stop")
        with anyio.fail_after(30), pytest.raises(SandboxFailure) as caught:
            await sh(sandbox, "true", timeout_s=1.0)
        assert caught.value.kind == FailureKind.UNREACHABLE
        with pytest.raises(SandboxFailure) as caught:
            await provider.remove(created.name)
        assert caught.value.kind == FailureKind.UNREACHABLE
    await engine("start")
