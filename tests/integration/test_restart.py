"""The server is killed and restarts on the same data."""

import random
from collections import Counter

import anyio
import pytest

from stream.connection.run_connection import connect
from stream.errors import FencedError, LeaseLostError
from stream.operator.status import read_status
from stream.trainer.trainer_lease import TrainerLease


async def test_killing_a_server_with_appendfsync_always_loses_and_repeats_nothing(make_server, run_name, pipe_on):
    server = make_server(fsync="always").start()
    names = {f"p{i}" for i in range(150)}
    chance = random.Random(7)

    async def work(worker: str) -> None:
        async with connect(server.url, run_name, reconnect_s=20) as connection:
            pipe = pipe_on(connection)
            stage = pipe.stage("prompts", worker, lease_s=0.5, infra_attempts=100)
            while (await read_status(connection)).stages["groups"].depth < len(names):
                claim = await stage.claim(4)
                for lease in claim.leases:
                    await anyio.sleep(0.01)
                    try:
                        if chance.random() < 0.2:
                            await stage.release(lease, "none", "")
                        else:
                            await stage.complete(lease, "groups", pipe.group(lease.prompt_id))
                    except LeaseLostError:
                        continue  # the reply was lost, not the work
                if not claim.leases:
                    await stage.wait(claim, 0.2)

    async with connect(server.url, run_name, reconnect_s=20) as connection:
        await pipe_on(connection).feed(*names)
        async with anyio.create_task_group() as tasks:
            for i in range(3):
                tasks.start_soon(work, f"w{i}")
            for _ in range(4):
                await anyio.sleep(chance.uniform(0.05, 0.25))
                server.kill()
                await anyio.sleep(0.05)
                server.start()
        entries = await connection.redis.xrange(connection.key("groups"))
        assert Counter(fields[b"prompt"].decode() for _, fields in entries) == Counter(names)
        assert (await read_status(connection)).stages["prompts"].depth == 0
        assert (await pipe_on(connection).prompt_counts())["outstanding"] == len(names)


async def test_leases_are_extended_after_a_server_restart(make_server, run_name, pipe_on):
    server = make_server(fsync="always").start()
    async with connect(server.url, run_name, reconnect_s=10) as connection:
        pipe = pipe_on(connection)
        await pipe.feed("a", "b")
        first = pipe.stage("prompts", "first", lease_s=0.6)
        renewed, forgotten = (await first.claim(2)).leases
        del first.leases[forgotten.id]
        server.kill()
        await anyio.sleep(0.7)
        server.start()
        other = pipe.stage("prompts", "other", lease_s=0.6)
        claim = await other.claim(2)
        assert claim.leases == []
        assert claim.next_due_s == pytest.approx(0.6, abs=0.1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(first.renew_leases)
            await anyio.sleep(0.7)
            tasks.cancel_scope.cancel()
        assert [lease.id for lease in (await other.claim(2)).leases] == [forgotten.id]
        await first.complete(renewed, "groups", pipe.group("a"))


async def test_the_trainers_lease_is_extended_after_a_server_restart(make_server, run_name, pipe_on):
    server = make_server(fsync="always").start()
    async with connect(server.url, run_name, reconnect_s=10) as connection:
        pipe = pipe_on(connection)
        await pipe.feed("a")
        await pipe.stage("prompts").claim(1)
        first = await TrainerLease.acquire(connection, 0.5)
        server.kill()
        await anyio.sleep(0.6)
        server.start()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(first.renew_forever)
            with pytest.raises(FencedError):
                await TrainerLease.acquire(connection, 0.5)
            tasks.cancel_scope.cancel()


async def test_a_server_that_lost_its_last_second_is_reconciled(make_server, run_name, pipe_on):
    """Lost writes are fed, claimed and completed again; completing an entry with a lost lease raises an error."""
    server = make_server(fsync="no").start()
    async with connect(server.url, run_name, reconnect_s=10) as connection:
        pipe = pipe_on(connection)
        await pipe.feed("a")
        worker = pipe.stage("prompts")
        await connection.redis.bgrewriteaof()
        while (await connection.redis.info("persistence"))["aof_rewrite_in_progress"]:
            await anyio.sleep(0.02)
        kept = {path: path.read_bytes() for path in server.socket.parent.rglob("*.aof")}
        (lease,) = (await worker.claim(1)).leases
        await pipe.feed("b")
        server.kill()
        for path, content in kept.items():
            path.write_bytes(content)
        server.start()
        with pytest.raises(LeaseLostError):
            await worker.complete(lease, "groups", pipe.group("a"))
        assert await pipe.prompt_counts() == {"fed": 1, "trained": 0, "dropped": 0, "dead": 0, "outstanding": 1}
        await pipe.feed("b")
        claim = await worker.claim(5)
        assert [each.prompt_id for each in claim.leases] == ["a", "b"]
