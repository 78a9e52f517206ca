"""A server with little memory: prompts leave room for the groups that are made of them, and nothing is charged."""

from functools import partial

import anyio
import pytest

from stream.connection.run_connection import connect
from stream.errors import ServerError
from stream.operator.status import read_status
from stream.queue.feed import Feed
from stream.records import Group, Prompt
from stream.trainer.ledger_records import Trained
from stream.trainer.trainer_lease import EndedGroup, TrainerLease
from workers.role.work_loop import work_loop

MIB = 1 << 20
PROMPTS, PROMPT_BYTES = 60, MIB // 8


@pytest.fixture
def server(make_server):
    return make_server("--appendonly", "no").start()


@pytest.fixture
async def server_connection(server, run_name):
    """A run on a server with room for about forty of sixty prompts."""
    async with connect(server.url, run_name, reconnect_s=1.0) as connection:
        used = (await connection.redis.info("memory"))["used_memory"]
        await connection.redis.config_set("maxmemory", used + 40 * PROMPT_BYTES)
        yield connection


async def feed_all(connection) -> None:
    feed = Feed(connection, max_queued_prompts=1000)
    text = "x" * PROMPT_BYTES
    for i in range(PROMPTS):
        prompt = Prompt(id=f"p{i:02}", messages=[{"role": "user", "content": text}])
        await feed.put([prompt], str(i or ""), str(i + 1))
    await feed.finish()


async def pass_on(stage, into, lease, _version) -> None:
    prompt = lease.prompt() if into == "groups" else lease.group().prompt
    await stage.complete(lease, into, Group(prompt=prompt, completions=[]))


async def test_a_feeder_with_more_prompts_than_memory_lets_every_group_complete_uncharged(server_connection, pipe_on):
    """The groups are as large as their prompts: a server that is full of prompts could complete none of them."""
    connection, pipe = server_connection, pipe_on(server_connection)
    trainer_lease = await TrainerLease.acquire(connection, 30.0)
    trainer, trained = pipe.stage("scored", "trainer"), 0
    refused = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(feed_all, connection)
        await anyio.sleep(0.5)  # the feeder fills what it may before the first claim
        for name, into in (("prompts", "groups"), ("groups", "scored")):
            stage = pipe.stage(name, f"w-{name}", capacity=8 if name == "prompts" else None)
            work = partial(pass_on, stage, into)
            tasks.start_soon(partial(work_loop, stage, work, concurrency=4, stopping=connection.stopping))
        with anyio.fail_after(30):
            while trained < PROMPTS:
                claim = await trainer.claim(4)
                if not claim.leases:
                    await trainer.wait(claim, 0.2)
                    continue
                ended = [EndedGroup(lease, Trained()) for lease in claim.leases]
                await trainer_lease.commit(trainer, ended, 1)
                await trainer_lease.acknowledge([lease.id for lease in claim.leases])
                trained += len(ended)
                version = await trainer_lease.reserve_version(0)
                await trainer_lease.publish(version, "weights", 1, {})  # the capacity of trained groups is free
                stats = await connection.redis.info("errorstats")
                refused.append(stats.get("errorstat_OOM", {}).get("count", 0))
        tasks.cancel_scope.cancel()
    status = await read_status(connection)
    assert status.prompt_counts == {"fed": PROMPTS, "trained": PROMPTS, "dropped": 0, "dead": 0, "outstanding": 0}
    assert refused[-1] == 0, "a call was refused for want of memory"


async def test_a_group_for_which_there_is_no_memory_is_given_back_uncharged(pipe, monkeypatch):
    await pipe.feed("a")
    stage, stopping = pipe.stage("prompts", infra_attempts=2), anyio.Event()
    monkeypatch.setattr(pipe.connection, "reconnect_s", 0.2)
    tries = []

    async def work(lease, _version) -> None:
        tries.append(lease.infra_failures)
        if len(tries) < 4:
            await pipe.connection.redis.config_set("maxmemory", 1)
        try:
            await stage.complete(lease, "groups", pipe.group("a"))
        except ServerError:
            raise
        else:
            stopping.set()
        finally:
            await pipe.connection.redis.config_set("maxmemory", 0)

    with anyio.fail_after(20):
        await work_loop(stage, work, concurrency=1, stopping=stopping)
    assert tries == [0, 0, 0, 0]
    assert (await read_status(pipe.connection)).stages["groups"].depth == 1
