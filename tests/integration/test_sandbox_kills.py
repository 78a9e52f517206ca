"""Workers with sandboxes are killed and suspended, Redis and the place too: nothing is left, and all are counted.

The place is a process of its own (`tests/cases/sandbox_place.py`), which creates late, loses answers and refuses
removals. The control is what most clients do: removal in a `finally`.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import pytest

from stream.connection.run_connection import RunConnection, connect
from stream.operator.control import release_worker
from stream.queue.sandboxes import SandboxPlace, read_sandbox_counts
from stream.validity import Measured, RolloutReason
from tests.cases.sandbox_place import PlaceProvider, reached, serve_place
from tests.cases.sandbox_worker import GROUP_SIZE
from tests.conftest import Pipe

WORKER = Path(__file__).parents[1] / "cases" / "sandbox_worker.py"
LEASE_S, GRACE_S, CREATE_S = 2.0, 1.0, 3.0
FAULTS = {"create_s": 0.15, "remove_s": 0.1, "lose_reply": 0.03, "refuse_removal": 0.1, "refuse_create": 0.01}
SLOWEST_S = LEASE_S + 60
WORKERS = 3


class Fleet:
    """Worker processes on a run.

    Args:
        connection: to the run.
        place: of its sandboxes.
        path: socket of the place.
        redis_url: of the run's server.
        unowned: the workers' sandboxes have no record.
    """

    def __init__(
        self, connection: RunConnection, place: PlaceProvider, path: Path, redis_url: str, *, unowned: bool = False
    ) -> None:
        self.connection, self.place = connection, place
        self.pids: list[int] = []
        self.dead: dict[int, float] = {}
        """When a process was killed, by its pid."""
        self.slowest_s = 0.0
        """The longest time for which a sandbox outlived its process."""
        options = {
            "redis": redis_url,
            "run": connection.run,
            "lease_s": LEASE_S,
            "unowned": unowned,
            "log": str(path.with_name("workers.log")),
            "sandboxes": {
                "provider": "tests.cases.sandbox_place:PlaceProvider",
                "address": str(path),
                "create_timeout_s": CREATE_S,
                "call_timeout_s": 5.0,
                "grace_s": GRACE_S,
                "starts_at_once": 4,
            },
        }
        self._parent = subprocess.Popen(
            [sys.executable, str(WORKER), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(WORKER.parents[2])},
        )
        self._fed = 0

    async def start(self, count: int = 1) -> None:
        """Start workers, and feed what they need."""
        for _ in range(count):
            self._parent.stdin.write("start\n")
            self._parent.stdin.flush()
            self.pids.append(pid := int(await anyio.to_thread.run_sync(self._parent.stdout.readline)))
            self.dead.pop(pid, None)  # a busy machine uses its numbers again within minutes

    async def feed(self, count: int) -> None:
        await Pipe(self.connection).feed(*(f"p{self._fed + n}" for n in range(count)))
        self._fed += count

    async def kill(self, pid: int, *, is_seen: bool) -> None:
        """Kill a worker; `is_seen` by a supervisor, which gives its entries back at once."""
        os.kill(pid, signal.SIGKILL)
        self.pids.remove(pid)
        self.dead[pid] = time.monotonic()
        if is_seen:
            await release_worker(self.connection, socket.gethostname(), pid, 10_000, "was killed")

    async def watch(self) -> None:
        """Note how long sandboxes outlive their workers, by the place's own list and the pids of their creators."""
        while True:
            with suppress(Exception):
                found = (await self.place.ask(do="creators"))["creators"]
                now = time.monotonic()
                ages = [now - self.dead[pid] for pid in found.values() if pid in self.dead]
                self.slowest_s = max([self.slowest_s, *ages])
            await anyio.sleep(0.2)

    async def drain(self) -> None:
        """Let the run finish, and wait for its workers."""
        await self.connection.write_hash("meta", {"finished": "enough"})
        with anyio.fail_after(90):
            while any(_is_alive(pid) for pid in self.pids):
                await anyio.sleep(0.1)
        self.pids.clear()

    def close(self) -> None:
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with self._parent:
            self._parent.kill()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@asynccontextmanager
async def fleet_of(redis_url: str, run: str, folder: Path, *, unowned: bool = False) -> AsyncIterator[Fleet]:
    with serve_place(folder) as path:
        async with (
            reached(path) as place,
            connect(redis_url, run, reconnect_s=60.0) as connection,
            anyio.create_task_group() as tasks,
        ):
            fleet = Fleet(connection, place, path, redis_url, unowned=unowned)
            tasks.start_soon(fleet.watch)
            try:
                yield fleet
            finally:
                fleet.close()
                tasks.cancel_scope.cancel()


async def shoot(fleet: Fleet, kills: int, suspensions: int, chance: random.Random) -> None:
    """Kill and suspend workers in random order, each at a random moment, and start others."""
    actions = ["kill"] * kills + ["suspend"] * suspensions
    chance.shuffle(actions)
    async with anyio.create_task_group() as tasks:
        for action in actions:
            await fleet.feed(8)
            await anyio.sleep(chance.expovariate(3.0))
            pid = chance.choice(fleet.pids)
            if action == "kill":
                await fleet.kill(pid, is_seen=chance.random() < 0.7)
            else:
                os.kill(pid, signal.SIGSTOP)
                fleet.pids.remove(pid)
                tasks.start_soon(wake, fleet, pid, LEASE_S * (0.5 + chance.random()) + GRACE_S * chance.random())
            await fleet.start(WORKERS - len(fleet.pids))


async def wake(fleet: Fleet, pid: int, after_s: float) -> None:
    await anyio.sleep(after_s)
    os.kill(pid, signal.SIGCONT)
    fleet.pids.append(pid)


async def account(fleet: Fleet) -> tuple[int, int, int, int]:
    """Return begun, stopped, reaped, stray, after asserting that nothing is left anywhere."""
    counts = await read_sandbox_counts(fleet.connection)
    assert await SandboxPlace(fleet.connection, "place.sock", "x").records() == {}
    assert [listed.name for listed in await fleet.place.list()] == []
    assert counts.begun == counts.ended
    assert fleet.slowest_s < SLOWEST_S
    return counts.begun, counts.stopped, counts.reaped, counts.stray


async def run_with_kills(redis_url: str, run: str, folder: Path, kills: int, suspensions: int) -> None:
    chance = random.Random(kills)
    async with fleet_of(redis_url, run, folder) as fleet:
        await fleet.place.ask(do="faults", faults=FAULTS)
        await fleet.feed(20)
        await fleet.start(WORKERS)
        await anyio.sleep(1.0)
        await shoot(fleet, kills, suspensions, chance)
        await fleet.place.ask(do="faults", faults={})
        await fleet.drain()
        begun, stopped, reaped, stray = await account(fleet)
        print(
            f"{kills} kills, {suspensions} suspensions: begun {begun:,} = stopped {stopped:,} + reaped {reaped:,} + "
            f"stray {stray:,}; slowest {fleet.slowest_s:.1f} s after the kill"
        )
        assert begun > kills
        assert reaped


async def test_kills_and_suspensions_leave_nothing(redis_url, run_name, tmp_path):
    await run_with_kills(redis_url, run_name, tmp_path, kills=12, suspensions=2)


@pytest.mark.full
@pytest.mark.timeout(3600)
async def test_a_thousand_kills_leave_nothing(redis_url, run_name, tmp_path):
    await run_with_kills(redis_url, run_name, tmp_path, kills=1000, suspensions=50)


async def run_with_kills_of_the_server(make_server, run: str, folder: Path, kills: int) -> None:
    server = make_server("--appendonly", "yes").start()
    async with fleet_of(server.url, run, folder) as fleet:
        await fleet.place.ask(do="faults", faults=FAULTS)
        await fleet.start(WORKERS)
        for _ in range(kills):
            await fleet.feed(60)
            await anyio.sleep(1.5)
            await anyio.to_thread.run_sync(server.kill)
            await anyio.sleep(0.5)
            await anyio.to_thread.run_sync(server.start)
        await fleet.place.ask(do="faults", faults={})
        await anyio.sleep(2 * CREATE_S + 1)  # a sandbox without a record is not stray before
        await fleet.drain()
        begun, stopped, reaped, stray = await account(fleet)
        print(f"{kills} kills of the server: begun {begun:,} = {stopped:,} + {reaped:,} + stray {stray:,}")


async def test_a_killed_server_leaves_nothing(make_server, run_name, tmp_path):
    await run_with_kills_of_the_server(make_server, run_name, tmp_path, kills=1)


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_ten_kills_of_the_server_leave_nothing(make_server, run_name, tmp_path):
    await run_with_kills_of_the_server(make_server, run_name, tmp_path, kills=10)


async def remove_by_hand(redis_url: str, run: str, folder: Path, episodes: int, removals: int) -> None:
    chance = random.Random(removals)
    async with fleet_of(redis_url, run, folder) as fleet:
        await fleet.feed(episodes // GROUP_SIZE)
        await fleet.start(WORKERS)
        removed = 0
        with anyio.fail_after(600):
            while removed < removals:
                listed = await fleet.place.list()
                removed += bool(listed) and await fleet.place.remove(chance.choice(listed).name)
                await anyio.sleep(chance.expovariate(20.0))
            while await fleet.connection.redis.xlen(fleet.connection.key("prompts")):
                await anyio.sleep(0.2)
        await fleet.drain()
        leases = (await Pipe(fleet.connection).stage("groups").claim(episodes)).leases
        completions = [completion for lease in leases for completion in lease.group().completions]
        await account(fleet)
    invalid = [each for each in completions if each.failure is not None]
    rewards = [part.reward for each in completions if each.failure is None for part in each.parts]
    print(f"{removed} of the sandboxes of {len(completions):,} episodes removed: {len(invalid)} invalid")
    assert len(completions) == episodes
    assert [each.failure for each in invalid if each.failure.reason is not RolloutReason.SANDBOX] == []
    assert {each.failure.cause.exception.split(":")[1].strip() for each in invalid} == {"lost"}
    assert rewards == [Measured(1.0)] * (episodes - len(invalid))
    assert len(invalid) > removals / 2


async def test_a_sandbox_removed_by_hand_is_an_invalid_completion(redis_url, run_name, tmp_path):
    await remove_by_hand(redis_url, run_name, tmp_path, episodes=100, removals=20)


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_two_hundred_removed_by_hand_are_no_zeros(redis_url, run_name, tmp_path):
    await remove_by_hand(redis_url, run_name, tmp_path, episodes=1000, removals=200)


@pytest.mark.parametrize("kills", [6])
async def test_the_control_leaks(redis_url, run_name, tmp_path, kills):
    """With `finally` alone, each kill leaves what the worker had open."""
    async with fleet_of(redis_url, run_name, tmp_path, unowned=True) as fleet:
        await fleet.feed(200)
        await fleet.start(2)
        await anyio.sleep(1.0)
        for _ in range(kills):
            await anyio.sleep(0.5)
            await fleet.kill(fleet.pids[0], is_seen=True)
            await fleet.start()
        await anyio.sleep(0.5)
        await fleet.drain()
        left = len(await fleet.place.list())
        print(f"{kills} kills left {left} sandboxes")
        assert left > 0
