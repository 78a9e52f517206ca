"""Leases of real processes: a live worker keeps its work however long it takes; a suspended one completes nothing."""

import sys

import aiohttp
import anyio
import pytest

from stream.connection.run_connection import connect
from stream.queue.feed import Feed
from stream.records import Prompt
from tests.e2e.by_hand import cast, feed, groups_in, until, waiting
from tests.scripted_engine.engine import ScriptedEngine

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("preloaded")]

LEASE_S = 1.0


def reply(prompt_ids, _request):
    return prompt_ids[:1]


@pytest.fixture
async def file(project, run_name):
    project.table["run"]["name"] = run_name
    project.table["queue"]["lease_s"] = LEASE_S
    return str(await anyio.to_thread.run_sync(project.write))


@pytest.fixture
async def connection(redis_url, run_name):
    """A connection with a long timeout, for tests whose processes take long to import their modules."""
    async with connect(redis_url, run_name, reconnect_s=30.0) as result:
        yield result


@pytest.fixture
async def roles(tmp_path):
    async with cast(tmp_path) as result:
        yield result


async def tell(engine: ScriptedEngine, order: str) -> None:
    async with aiohttp.ClientSession() as session, session.post(f"{engine.url}/{order}", json={}) as response:
        assert response.status == 200


async def in_groups(connection, n: int) -> None:
    await until(connection, lambda: _has(connection, "groups", n))


async def _has(connection, stage, n: int) -> bool:
    return await connection.redis.xlen(connection.key(stage)) >= n


async def busy(engine: ScriptedEngine, n: int) -> None:
    """Wait until the engine has received `n` requests."""
    with anyio.fail_after(40):
        while engine.request_count < n:
            await anyio.sleep(0.02)


@pytest.mark.full
async def test_an_episode_twenty_leases_long_is_finished_by_its_first_worker(
    project, file, connection, redis_url, roles
):
    async with ScriptedEngine(reply, version="0", delay_s=20 * LEASE_S) as engine:
        command = project.command("rollout", file, "--redis", redis_url, "--engine", engine.url)
        workers = [await roles.start(command) for _ in range(2)]
        await until(connection, lambda: _idle(connection, 2))
        await feed(connection, "long")
        await in_groups(connection, 1)
        (group,) = await groups_in(connection, "groups")
        assert engine.request_count == len(group.completions) == 2
        assert group.attempt == 0
        for worker in workers:
            assert worker.process.returncode is None
            assert "lease.lost" not in worker.said()
        assert sum(name in group.worker for name in (str(w.pid) for w in workers)) == 1


async def _idle(connection, n: int) -> bool:
    return await waiting(connection) >= n


async def test_a_suspended_rollout_worker_discards_its_result_and_continues(
    project, file, connection, redis_url, roles
):
    async with ScriptedEngine(reply, version="0") as engine:
        command = project.command("rollout", file, "--redis", redis_url, "--engine", engine.url)
        await tell(engine, "pause?mode=keep")
        await feed(connection, "a")
        suspended = await roles.start(command)
        await busy(engine, 2)
        suspended.suspend()
        other = await roles.start(command)
        await busy(engine, 4)  # the lease has expired
        await tell(engine, "resume")  # the suspended worker receives its answers as well
        await in_groups(connection, 1)
        await other.drain()
        suspended.go_on()
        await suspended.says("lease.lost", "result.discarded")
        await feed(connection, "b", "c")
        await in_groups(connection, 3)
        done = {group.prompt.id: group for group in await groups_in(connection, "groups")}
        assert sorted(done) == ["a", "b", "c"]
        assert await connection.redis.xlen(connection.key("groups")) == 3, "each of them once"
        assert engine.request_count == 2 + 2 * 3, "the group was rolled out once more, and once only"
        by = {name: f"-{role.pid}-" for name, role in (("suspended", suspended), ("other", other))}
        assert by["other"] in done["a"].worker
        assert done["a"].attempt == 1
        assert all(by["suspended"] in done[each].worker for each in "bc")
        assert all(done[each].attempt == 0 for each in "bc")


BIG = """
class Big:
    def reset(self, **row):
        self.blob = [bytes(1000) for _ in range(50_000)]
        self.texts = {str(i): "x" * 1000 for i in range(50_000)}
        self.table = {i: [float(i)] * 10 for i in range(50_000)}

    def get_reward(self, messages):
        return float(len(messages))
"""


TOKENS = 100_000
ENGINE = f"""
import anyio
from tests.scripted_engine.engine import ScriptedEngine

async def serve():
    script = list(range(10, 20)) * {TOKENS // 10}
    async with ScriptedEngine(lambda *_: script, version="0", max_length={2 * TOKENS}) as engine:
        print(engine.url, flush=True)
        await anyio.sleep_forever()

anyio.run(serve)
"""


@pytest.mark.full
@pytest.mark.timeout(400)
async def test_long_completions_and_large_states_on_a_busy_machine_cost_no_lease(
    project, connection, redis_url, roles, run_name
):
    """Four groups of 8 completions of 100,000 tokens; each environment holds 100 MB, which its snapshot leaves out."""
    ids, size = "abcd", 8
    (project.folder / "big.py").write_text(BIG)
    project.table["environments"] = {"big": f"{project.folder / 'big.py'}:Big"}
    project.table["run"]["name"] = run_name
    project.table["queue"]["lease_s"] = 3.0
    project.table["engine"]["max_model_len"] = 2 * TOKENS
    project.table["rollout"] = {
        "group_size": size, "max_tokens": TOKENS, "max_tokens_per_turn": TOKENS, "groups_in_flight": 2
    }  # fmt: skip
    file = str(await anyio.to_thread.run_sync(project.write))
    engine = await roles.start([sys.executable, "-c", ENGINE])
    await engine.says("http://")
    command = project.command("rollout", file, "--redis", redis_url, "--engine", engine.said().strip())
    workers = [await roles.start(command) for _ in range(2)]
    await until(connection, lambda: _idle(connection, 2))
    for _ in range(2):
        await roles.start([sys.executable, "-c", "while True: pass"])
    prompts = [
        Prompt(id=each, messages=[{"role": "user", "content": "Say."}], environment="big", group_size=size)
        for each in ids
    ]
    await Feed(connection, max_queued_prompts=1000).put(prompts, "", "4")
    await until(connection, lambda: _has(connection, "groups", len(ids)), within_s=300)
    groups = await groups_in(connection, "groups")
    assert [group.attempt for group in groups] == [0] * len(ids)
    for group in groups:
        for completion in group.completions:
            assert completion.failure is None
            assert len(completion.rows[0].tokens) == TOKENS
            assert len(completion.snapshot) < 10_000
    for worker in workers:
        assert "lease.lost" not in worker.said()


SLOW = """
import time
from pathlib import Path

HERE = Path(__file__).parent

def slow(completions, **columns):
    with open(HERE / "calls", "a") as file:
        file.write("called\\n")
    while not (HERE / "go").exists():
        time.sleep(0.01)
    return [1.0 for _ in completions]
"""


async def test_a_suspended_scorer_discards_its_result_and_continues(project, connection, redis_url, roles, pipe_on):
    def write() -> str:
        (project.folder / "rewards.py").write_text(SLOW)
        project.table["rewards"] = [{"ref": f"{project.folder / 'rewards.py'}:slow"}]
        project.table["run"]["name"] = connection.run
        project.table["queue"]["lease_s"] = LEASE_S
        return str(project.write())

    def calls() -> int:
        path = project.folder / "calls"
        return len(path.read_text().splitlines()) if path.exists() else 0

    async def called(n: int) -> None:
        with anyio.fail_after(40):
            while await anyio.to_thread.run_sync(calls) < n:
                await anyio.sleep(0.02)

    command = project.command("score", await anyio.to_thread.run_sync(write), "--redis", redis_url)
    pipe = pipe_on(connection)
    await pipe.rolled_out("a")
    suspended = await roles.start(command)
    await called(1)
    suspended.suspend()
    other = await roles.start(command)
    await called(2)
    await anyio.to_thread.run_sync((project.folder / "go").touch)
    await until(connection, lambda: _has(connection, "scored", 1))
    await other.drain()
    suspended.go_on()
    await suspended.says("lease.lost", "result.discarded")
    await pipe.rolled_out("b", "c")
    await until(connection, lambda: _has(connection, "scored", 3))
    assert [group.prompt.id for group in await groups_in(connection, "scored")] == ["a", "b", "c"]
    assert await anyio.to_thread.run_sync(calls) == 4
    assert await connection.redis.xlen(connection.key("groups")) == 0
    await pipe.prompt_counts()
