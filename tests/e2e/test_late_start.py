"""Roles that start before the services they depend on wait, log it once, use no CPU, and begin when it is available.

Meanwhile a second trainer is refused without disturbing the first.
"""

import time
from pathlib import Path

import anyio
import msgspec
import pytest

from tests.e2e.by_hand import Role, cast
from tests.e2e.test_idle import cpu_seconds
from tests.scripted_engine.engine import ScriptedEngine
from tests.soak import project
from tests.soak.audit import acquitted, audit
from tests.soak.engine import reply
from tests.soak.proxy import Proxy, address_of
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


def events_of(role: Role) -> list[str]:
    """Return all logged events, without the warnings that an overloaded machine causes."""
    return [line["event"] for line in role.events() if line["event"] != "event_loop.blocked"]


def wakeups(pid: int) -> int:
    """Count the voluntary context switches of all threads of a process; polling raises them even at low CPU use."""
    statuses = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status")]
    return sum(int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0]) for text in statuses)


async def are_quiet(roles: list[Role], seconds: float) -> bool:
    """Wait until all roles have been idle for `seconds` at a stretch; a polling role never is."""
    with anyio.fail_after(20 * seconds + 60):
        while await restless(roles, seconds):
            pass
    return True


async def restless(roles: list[Role], seconds: float) -> list[str]:
    """Return the logs of roles that were busy or polling during the next `seconds`."""
    began, before = time.monotonic(), [(cpu_seconds(role.pid), wakeups(role.pid)) for role in roles]
    await anyio.sleep(seconds)
    took = time.monotonic() - began
    return [
        role.log.name
        for role, (cpu, woken) in zip(roles, before, strict=True)
        if (cpu_seconds(role.pid) - cpu) / took >= BUSY or (wakeups(role.pid) - woken) / took >= RESTLESS
    ]


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
    async with Proxy() as way_to_the_engine, ScriptedEngine(reply) as engine, cast(tmp_path) as roles:
        # The trainer reaches the engine; rollout workers do not yet, so the prompts stay unclaimed.
        specs = project.roles(settings, file, server.url, (engine.url,))
        cut_off = project.roles(settings, file, server.url, (way_to_the_engine.url("http"),))
        specs = [cut_off[i] if spec.role == "rollout" else spec for i, spec in enumerate(specs)]
        everybody = feed, rollout, score, train = [await roles.start(spec.command) for spec in specs]
        for role in everybody:
            await role.logs("redis.waiting")
        assert await are_quiet(everybody, wait_s)
        assert [events_of(role) for role in everybody] == [["redis.waiting"]] * len(everybody)

        server.start()
        for role in everybody:
            await role.logs("role.started")
        await rollout.logs("engine.waiting", what="answer")
        await train.logs("policy.published", version=0)
        second = await roles.start(specs[-1].command)
        assert await second.ended(60) == ExitCode.PERMANENT
        assert "trains run 'soak' already; stop it first" in second.said()
        await score.logs("work.waiting", stage="groups")
        await train.logs("work.waiting", stage="scored")
        assert await are_quiet(everybody, wait_s)
        came = ["redis.waiting", "redis.recovered", "role.started"]
        assert events_of(feed) == came
        assert events_of(rollout) == [*came, "engine.waiting"]
        assert events_of(score) == [*came, "work.waiting"]
        assert events_of(train) == [*came, "trainer.started", "policy.published", "work.waiting"]

        way_to_the_engine.upstream = address_of(engine.url)
        for role in everybody:
            assert await role.ended(60) == 0, role.said()
        assert "engine.recovered" in events_of(rollout)
        assert "work.available" in events_of(score)
        verdict = await anyio.to_thread.run_sync(audit, settings.folder, GROUPS)
    assert acquitted(verdict, GROUPS), verdict
