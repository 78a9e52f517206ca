"""Roles that start before the services they depend on wait, log it once, use no CPU, and begin when it is available.

Meanwhile a second trainer is refused without disturbing the first.
"""

import json
import time
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest

from tests.chaos import project
from tests.chaos.audit import acquitted, audit
from tests.chaos.engine import reply
from tests.e2e.harness import environment
from tests.e2e.test_idle import cpu_seconds
from tests.faults.proxy import Proxy, address_of
from tests.preload.fixtures import pid_of
from tests.scripted_engine.engine import ScriptedEngine
from workers.role.exit_codes import ExitCode
from workers.runs.folder import write_settings
from workers.settings import Settings

pytestmark = pytest.mark.usefixtures("preloaded")


GROUPS = 48
"""More than the prompt backlog holds, so that the feeder waits as well."""
BUSY = 0.1
"""CPU use, as a fraction of a core, from which a waiting process counts as busy."""
RESTLESS = 100.0
"""Wakeups per second from which a waiting process counts as polling."""


class Watched:
    """A role's process, its log and its CPU use."""

    def __init__(self, spec, folder) -> None:
        self.spec = spec
        self.log = folder / f"{spec.name}.log"

    @property
    def pid(self) -> int:
        """The process id of the worker, not of its parent."""
        return pid_of(self.process.pid)

    async def start(self) -> None:
        with self.log.open("w") as file:
            self.process = await anyio.open_process(self.spec.command, env=environment(), stdout=file, stderr=file)

    def lines(self) -> list[dict]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def events(self) -> list[str]:
        """Return all logged events, without the warnings that an overloaded machine causes."""
        return [line["event"] for line in self.lines() if line["event"] != "event_loop.blocked"]

    async def said(self, event: str, **details) -> None:
        """Wait until the role has logged `event` with these details."""
        with anyio.fail_after(60):
            while not any({"event": event, **details}.items() <= line.items() for line in self.lines()):
                assert self.process.returncode is None, self.log.read_text()
                await anyio.sleep(0.05)


def wakeups(pid: int) -> int:
    """Count the voluntary context switches of all threads of a process; polling raises them even at low CPU use."""
    statuses = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status")]
    return sum(int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0]) for text in statuses)


async def are_quiet(roles: list[Watched], seconds: float) -> bool:
    """Wait until all roles have been idle for `seconds` at a stretch; a polling role never is."""
    with anyio.fail_after(20 * seconds + 60):
        while await restless(roles, seconds):
            pass
    return True


async def restless(roles: list[Watched], seconds: float) -> list[str]:
    """Return the names of roles that were busy or polling during the next `seconds`."""
    began, before = time.monotonic(), [(cpu_seconds(role.pid), wakeups(role.pid)) for role in roles]
    await anyio.sleep(seconds)
    took = time.monotonic() - began
    return [
        role.spec.name
        for role, (cpu, woken) in zip(roles, before, strict=True)
        if (cpu_seconds(role.pid) - cpu) / took >= BUSY or (wakeups(role.pid) - woken) / took >= RESTLESS
    ]


@asynccontextmanager
async def ended(roles: list[Watched]):
    """End all of these processes when the context ends, after errors as well."""
    try:
        yield
    finally:
        for role in roles:
            if role.process.returncode is None:
                role.process.kill()
            await role.process.wait()
            await role.process.aclose()


def with_one_of_each(settings: Settings, redis: str, reconnect_s: float) -> Settings:
    """Return the settings with one worker per role, and this reconnect timeout."""
    replace = msgspec.structs.replace
    return replace(
        settings,
        run=replace(settings.run, redis=redis),
        rollout=replace(settings.rollout, workers=1),
        score=replace(settings.score, workers=1),
        queue=replace(settings.queue, reconnect_timeout_s=reconnect_s),
    )


@pytest.mark.parametrize(
    "wait_s",
    [
        pytest.param(1.2, marks=pytest.mark.timeout(150)),
        pytest.param(60.0, marks=[pytest.mark.full, pytest.mark.timeout(400)]),
    ],
)
async def test_roles_wait_quietly_for_the_server_and_workers_for_the_engine(tmp_path, make_server, wait_s):
    settings = project.write_project(tmp_path, GROUPS, seed=1)
    server = make_server()
    settings = with_one_of_each(settings, server.url, reconnect_s=4 * wait_s + 60)
    settings.folder.mkdir()
    file = await anyio.to_thread.run_sync(write_settings, settings)
    async with Proxy() as way_to_the_engine, ScriptedEngine(reply) as engine:
        # The trainer reaches the engine; rollout workers do not yet, so the prompts stay unclaimed.
        specs = project.roles(settings, file, server.url, (engine.url,))
        cut_off = project.roles(settings, file, server.url, (way_to_the_engine.url("http"),))
        specs = [cut_off[i] if spec.role == "rollout" else spec for i, spec in enumerate(specs)]
        everybody = feed, rollout, score, train = [Watched(spec, tmp_path) for spec in specs]
        for role in everybody:
            await role.start()
        async with ended(everybody):
            for role in everybody:
                await role.said("redis.waiting")
            assert await are_quiet(everybody, wait_s)
            assert [role.events() for role in everybody] == [["redis.waiting"]] * len(everybody)

            server.start()
            for role in everybody:
                await role.said("role.started")
            await rollout.said("engine.waiting", what="answer")
            await train.said("policy.published", version=0)
            second = Watched(msgspec.structs.replace(train.spec, index=1), tmp_path)
            await second.start()
            async with ended([second]):
                with anyio.fail_after(60):
                    assert await second.process.wait() == ExitCode.PERMANENT
            assert "trains run 'chaos' already; stop it first" in second.log.read_text()
            await score.said("work.waiting", stage="groups")
            await train.said("work.waiting", stage="scored")
            assert await are_quiet(everybody, wait_s)
            came = ["redis.waiting", "redis.recovered", "role.started"]
            assert feed.events() == came
            assert rollout.events() == [*came, "engine.waiting"]
            assert score.events() == [*came, "work.waiting"]
            assert train.events() == [*came, "trainer.started", "policy.published", "work.waiting"]

            way_to_the_engine.upstream = address_of(engine.url)
            with anyio.fail_after(60):
                for role in everybody:
                    assert await role.process.wait() == 0, role.log.read_text()
            assert "engine.recovered" in rollout.events()
            assert "work.available" in score.events()
            verdict = await anyio.to_thread.run_sync(audit, settings.folder, GROUPS)
    assert acquitted(verdict, GROUPS), verdict
