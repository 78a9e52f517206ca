"""`rollout.resume`: workers are killed in mid-episode; few turns are sampled again, and no effect happens twice."""

import random
from collections import Counter

import anyio
import pytest

from stream.connection.run_connection import connect
from stream.operator.audit import read_turn_counts
from stream.operator.dead_letters import list_dead_letters
from stream.validity import RolloutReason
from tests.e2e.by_hand import cast, feed, groups_in, until
from tests.scripted_engine.engine import ScriptedEngine

pytestmark = [pytest.mark.usefixtures("preloaded")]

ENVIRONMENTS = '''
import zlib


class Questions:
    """Answers each turn, and has questions for five more."""

    replayable = True

    def reset(self, prompt, completion_index, **row):
        self.number, self.task = 0, f"{prompt}, {completion_index}"
        return f" You are {completion_index}."

    def respond(self, message):
        self.number += 1
        return f"Question {self.number} after {zlib.crc32(message.encode())}" if self.number < 6 else None

    def get_reward(self):
        return 1.0


class Orders(Questions):
    """Notes each answer in a file, which nothing takes back."""

    replayable = False
    effects = "external"

    def respond(self, message):
        with open("orders.txt", "a") as orders:
            orders.write(f"{self.task}: {self.number}\\n")
        return super().respond(message)
'''
SIZE, TURNS, IN_FLIGHT = 4, 6, 2


def by_prompt(groups):
    return {group.prompt.id: [(c.rows, c.messages, c.turns) for c in group.completions] for group in groups}


async def rolled_out_at_once(project, redis_url, run_name, tmp_path, prompts):
    """Return the groups of a run whose worker is not killed."""
    project.table["run"] |= {"name": f"{run_name}-whole", "folder": str(tmp_path / "whole")}
    file = str(await anyio.to_thread.run_sync(project.write))
    async with (
        connect(redis_url, f"{run_name}-whole", reconnect_s=30.0) as connection,
        ScriptedEngine(lambda ids, _: ids[-9:-5], version="0") as engine,
        cast(tmp_path) as roles,
    ):
        for number in range(prompts):
            await feed(connection, f"q{number}", group_size=SIZE, environment="questions")
        worker = await roles.start(project.command("rollout", file, "--redis", redis_url, "--engine", engine.url))

        async def all_done() -> bool:
            return await connection.redis.xlen(connection.key("groups")) == prompts

        await until(connection, all_done, within_s=300)
        await worker.drain()
        return await groups_in(connection, "groups")


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(6, marks=pytest.mark.timeout(180)),
        pytest.param(200, marks=[pytest.mark.full, pytest.mark.timeout(2400)]),
    ],
)
async def test_killed_workers_leave_episodes_that_go_on(kills, project, redis_url, run_name, tmp_path):
    prompts, chance = kills, random.Random(kills)
    project.table["environments"] = {
        "questions": {"ref": f"{tmp_path}/talks.py:Questions"}, "orders": {"ref": f"{tmp_path}/talks.py:Orders"}
    }  # fmt: skip
    project.table["rewards"] = []
    project.table["rollout"] |= {"group_size": SIZE, "groups_in_flight": IN_FLIGHT, "max_tokens": 2000}
    project.table["engine"]["max_model_len"] = 4096
    project.table["train"]["batch_size"] = 2 * prompts  # nothing is trained, so all of them are outstanding
    project.table["queue"] |= {"lease_s": 1.0, "max_attempts": 1000}
    (tmp_path / "talks.py").write_text(ENVIRONMENTS)
    whole = await rolled_out_at_once(project, redis_url, run_name, tmp_path, prompts)
    project.table["run"] |= {"name": run_name, "folder": str(tmp_path / "killed")}
    file = str(await anyio.to_thread.run_sync(project.write))
    asked: list[tuple[int, ...]] = []

    def reply(ids, _request):
        asked.append(tuple(ids))
        return ids[-9:-5]

    async with (
        connect(redis_url, run_name, reconnect_s=30.0) as connection,
        ScriptedEngine(reply, version="0", delay_s=0.05) as engine,
        cast(tmp_path) as roles,
    ):
        for number in range(prompts):
            await feed(connection, f"q{number}", group_size=SIZE, environment="questions")
            await feed(connection, f"o{number}", group_size=SIZE, environment="orders")
        command = project.command("rollout", file, "--redis", redis_url, "--engine", engine.url)
        for _ in range(kills):
            worker, before, more = await roles.start(command), len(asked), chance.randint(1, 4 * SIZE)
            with anyio.move_on_after(60):
                while len(asked) < before + more:
                    await anyio.sleep(0.01)
            assert len(asked) >= before + more, worker.said()
            await anyio.sleep(chance.random() * 0.06)
            worker.kill()
            await worker.ended()

        async def all_done() -> bool:
            return await connection.redis.xlen(connection.key("groups")) == 2 * prompts

        last = await roles.start(command)
        await until(connection, all_done, within_s=120 if kills < 10 else 900)
        await last.drain()
        assert not await list_dead_letters(connection)
        found = await groups_in(connection, "groups")
        turns = await read_turn_counts(connection)
        left = await connection.redis.keys(connection.key("prompts:*:*-*"))
    orders = Counter((await anyio.Path(tmp_path / "orders.txt").read_text()).splitlines())
    questions = [group for group in found if group.prompt.environment == "questions"]
    again = len(asked) - len(set(asked))
    print(f"{kills} kills: {again} of {len(set(asked))} turns sampled again; {len(orders)} effects; {turns}")
    assert by_prompt(questions) == by_prompt(whole), "bit for bit"
    assert again <= kills * SIZE * IN_FLIGHT
    assert set(orders.values()) == {1}, "each effect once"
    for group in found:
        for completion in group.completions:
            assert completion.failure is None or completion.failure.reason is RolloutReason.EFFECTS
            if group.prompt.environment == "orders" and completion.failure is None:
                assert completion.turns == TURNS
                said = f"Say {group.prompt.id}., {completion.index}: "
                assert sum(order.startswith(said) for order in orders) == TURNS
    assert turns.resumed["replay"] > 0
    assert turns.resumed["never"] == sum(c.failure is not None for group in found for c in group.completions)
    assert turns.is_balanced
    assert turns.kept == sum(c.turns for group in found for c in group.completions)
    assert (turns.unfinished, left) == (0, [])
