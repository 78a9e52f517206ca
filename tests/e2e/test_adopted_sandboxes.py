"""Workers are killed in mid-episode whose sandboxes survive: the next one adopts them, and every command runs once."""

import random

import anyio
import pytest

from stream.connection.run_connection import connect
from stream.operator.audit import read_turn_counts
from stream.operator.dead_letters import list_dead_letters
from stream.queue.sandboxes import read_sandbox_counts, read_sandbox_places, read_sandboxes
from stream.validity import Measured
from tests.cases.sandbox_place import reached, serve_place
from tests.e2e.by_hand import cast, feed, groups_in, until
from tests.scripted_engine.engine import ScriptedEngine

pytestmark = [pytest.mark.usefixtures("preloaded")]

ENVIRONMENT = '''
from envs.sandboxes.contract import SandboxSpec


class Log:
    """Appends a number to a file in its sandbox at each turn, and writes files that it then changes."""

    async def reset(self, completion_index, sandboxes, **row):
        self.number = 0
        self.sandbox = await sandboxes.open(SandboxSpec(memory_mb=64, disk_mb=64, max_life_s=600), purpose="agent")
        await self.sandbox.write({"state": b"begun"})
        return f" You are {completion_index}."

    async def respond(self, message):
        number, self.number = self.number, self.number + 1
        result = await self.sandbox.exec(["append", "log", f"{number};", "0.05"], timeout_s=5)
        await self.sandbox.write({"state": f"{number}".encode()})
        await self.sandbox.exec(["append", "log", f"{number}.;", "0.01"], timeout_s=5)
        return result.stdout.decode() if self.number < 6 else None

    async def get_reward(self):
        self.log = (await self.sandbox.read("log", 1000)).decode()
        self.state = (await self.sandbox.read("state", 1000)).decode()
        return float(self.log == "".join(f"{n};{n}.;" for n in range(6)) and self.state == "5")
'''
SIZE, IN_FLIGHT = 4, 2


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(4, marks=pytest.mark.timeout(180)),
        pytest.param(100, marks=[pytest.mark.full, pytest.mark.timeout(1500)]),
    ],
)
async def test_the_next_worker_goes_on_in_the_same_sandboxes(kills, project, redis_url, run_name, tmp_path):
    groups, chance = kills, random.Random(kills)
    project.table["run"]["name"] = run_name
    project.table["environments"] = {"log": {"ref": f"{tmp_path}/log.py:Log"}}
    project.table["rewards"] = []
    project.table["rollout"] |= {"group_size": SIZE, "groups_in_flight": IN_FLIGHT, "max_tokens": 2000}
    project.table["engine"]["max_model_len"] = 4096
    project.table["train"]["batch_size"] = groups  # nothing is trained, so all of them are outstanding
    project.table["queue"] |= {"lease_s": 1.0, "max_attempts": 1000}
    (tmp_path / "log.py").write_text(ENVIRONMENT)
    asked: list[tuple[int, ...]] = []

    def reply(ids, _request):
        asked.append(tuple(ids))
        return ids[-9:-5]

    with serve_place(tmp_path) as place:
        project.table["sandboxes"] = {
            "provider": "tests.cases.sandbox_place:PlaceProvider", "address": str(place), "starts_at_once": 8
        }  # fmt: skip
        file = str(await anyio.to_thread.run_sync(project.write))
        async with (
            connect(redis_url, run_name, reconnect_s=30.0) as connection,
            ScriptedEngine(reply, version="0", delay_s=0.05) as engine,
            cast(tmp_path) as roles,
        ):
            for number in range(groups):
                await feed(connection, f"p{number}", group_size=SIZE, environment="log")
            command = project.command("rollout", file, "--redis", redis_url, "--engine", engine.url)
            for _ in range(kills):
                worker, before, more = await roles.start(command), len(asked), chance.randint(1, 3 * SIZE)
                with anyio.move_on_after(60):
                    while len(asked) < before + more:
                        await anyio.sleep(0.01)
                assert len(asked) >= before + more, worker.said()
                await anyio.sleep(chance.random() * 0.12)
                worker.kill()
                await worker.ended()

            async def all_done() -> bool:
                return await connection.redis.xlen(connection.key("groups")) == groups

            last = await roles.start(command)
            await until(connection, all_done, within_s=120 if kills < 10 else 600)
            await last.drain()
            assert not await list_dead_letters(connection)
            found = await groups_in(connection, "groups")
            turns, counts = await read_turn_counts(connection), await read_sandbox_counts(connection)
            (where,) = await read_sandbox_places(connection)
            records = await read_sandboxes(connection, where)
        async with reached(place) as provider:
            left = {each.name for each in await provider.list()}
    again = len(asked) - len(set(asked))
    print(f"{kills} kills: {again} of {len(set(asked))} turns sampled again; {turns}; {counts}")
    for group in found:
        for completion in group.completions:
            assert (completion.failure, completion.turns) == (None, 6)
            assert [part.reward for part in completion.parts] == [Measured(1.0)], "every command once, in its order"
    assert again <= kills * SIZE * IN_FLIGHT
    assert turns.resumed["adopt"] > 0
    assert turns.is_balanced
    assert counts.adopted >= turns.resumed["adopt"]
    assert counts.begun == counts.ended + len(records)
    assert left <= set(records), "those of killed workers whose time to be adopted is not over"
