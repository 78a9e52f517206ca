"""`rollout.resume`: workers are killed at random moments while agents run; what was sampled is not sampled again."""

import random
from itertools import accumulate

import anyio
import pytest

from stream.connection.run_connection import connect
from stream.operator.dead_letters import list_dead_letters
from tests.e2e.by_hand import cast, feed, groups_in, until
from tests.scripted_engine.engine import ScriptedEngine

pytestmark = [pytest.mark.usefixtures("preloaded")]

AGENT = '''
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from envs.contract import AgentEnvironment


class Loop(AgentEnvironment):
    """Three turns, then two sub-agents of two turns each, then a last one. It does the same for the same answers."""

    def reset(self, prompt, completion_index, **row):
        self.task = f"{prompt}, {completion_index}"

    def run_episode(self, endpoint, sampling):
        self.endpoint = endpoint
        main = []
        for turn in range(3):
            main = self.ask(main, f"{self.task}, turn {turn}")
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(self.sub, "ab"))
        self.ask(main, "the results")

    def sub(self, name):
        conversation = []
        for turn in range(2):
            conversation = self.ask(conversation, f"{self.task}, sub {name}, turn {turn}")

    def ask(self, before, text):
        messages = [*before, {"role": "user", "content": text}]
        body = json.dumps({"messages": messages}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.endpoint}/chat/completions", body, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return [*messages, json.load(answer)["choices"][0]["message"]]

    def get_reward(self):
        return 1.0
'''
SIZE, TURNS, LIVE = 2, 8, 2
"""Completions of a group; turns of each; branches of each that ask at the same time, at most."""


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(6, marks=pytest.mark.timeout(180)),
        pytest.param(100, marks=[pytest.mark.full, pytest.mark.timeout(1500)]),
    ],
)
async def test_after_a_kill_at_most_one_turn_of_each_live_branch_is_sampled_again(
    kills, project, redis_url, run_name, tmp_path
):
    groups = kills  # a worker on a busy machine finishes one before it is killed
    chance = random.Random(kills)
    project.table["run"]["name"] = run_name
    project.table["environments"] = {"loop": {"ref": f"{tmp_path}/loop.py:Loop"}}
    project.table["rewards"] = []
    project.table["rollout"] |= {"group_size": SIZE, "groups_in_flight": 1, "max_tokens": 200, "max_turns": 20}
    project.table["engine"]["max_model_len"] = 4096
    project.table["train"]["batch_size"] = groups  # nothing is trained, so all of them are outstanding
    project.table["queue"] |= {"lease_s": 1.0, "max_attempts": 1000}  # some are killed often before their next turn
    (tmp_path / "loop.py").write_text(AGENT)
    file = str(await anyio.to_thread.run_sync(project.write))
    asked: list[tuple[int, ...]] = []

    def reply(ids, _request):
        asked.append(tuple(ids))
        return ids[:3]

    async with (
        connect(redis_url, run_name, reconnect_s=30.0) as connection,
        ScriptedEngine(reply, version="0", delay_s=0.05) as engine,
        cast(tmp_path) as roles,
    ):
        for number in range(groups):
            await feed(connection, str(number), group_size=SIZE, environment="loop")
        command = project.command("rollout", file, "--redis", redis_url, "--engine", engine.url)
        again = []
        for _ in range(kills):
            worker, before, more = await roles.start(command), len(asked), chance.randint(1, 6)
            with anyio.fail_after(60):
                while len(asked) < before + more:
                    await anyio.sleep(0.01)
            await anyio.sleep(chance.random() * 0.06)
            worker.kill()
            await worker.ended()
            again.append(len(set(asked[:before]) & set(asked[before:])))

        async def all_done() -> bool:
            return await connection.redis.xlen(connection.key("groups")) == groups

        before = len(asked)
        last = await roles.start(command)
        await until(connection, all_done, within_s=120 if kills < 10 else 600)
        again.append(len(set(asked[:before]) & set(asked[before:])))
        await last.drain()
        assert not await connection.redis.keys(connection.key("prompts:turns:*")), "the server's memory is free"
        assert not await list_dead_letters(connection)
        found = await groups_in(connection, "groups")
        counts = {name: int(n) for name, n in (await connection.read_hash("turns")).items()}
    print(f"{kills} kills: {sum(again)} turns of {len(set(asked))} sampled again")
    for number, total in enumerate(accumulate(again)):  # a worker may die before it asks again what another one lost
        assert total <= number * SIZE * LIVE
    assert len(set(asked)) == groups * SIZE * TURNS
    assert counts.pop("resumed:replay") > 0
    assert counts == {"sampled": groups * SIZE * TURNS, "kept": groups * SIZE * TURNS}
    for group in found:
        assert [(c.turns, c.failure, c.truncated) for c in group.completions] == [(TURNS, None, None)] * SIZE
        for completion in group.completions:
            assert sorted(branch.turns for branch in completion.branches) == [2, 2, 4]
            contexts = [
                tuple([*row.prompt, *row.tokens][: len(row.prompt) + start])
                for row in completion.rows
                for start, _ in row.sampled_ranges
            ]
            assert len(contexts) == TURNS
            assert set(contexts) <= set(asked)
