"""The connection survives restarts of its server, and refuses a server that would lose work."""

import time

import anyio
import pytest
from redis import Redis
from structlog.testing import capture_logs

from stream.connection.run_connection import connect
from stream.errors import ServerError
from stream.operator.status import read_status
from stream.trainer.ledger_records import Trained
from stream.trainer.trainer_lease import EndedGroup, TrainerLease


@pytest.fixture
def server(make_server):
    return make_server().start()


async def test_a_claim_waits_for_a_killed_server_to_restart(server, run_name, pipe_on):
    async with connect(server.url, run_name, reconnect_s=10) as connection:
        pipe = pipe_on(connection)
        await pipe.feed("a")
        await anyio.sleep(1.1)  # the append-only file is synced every second
        server.kill()
        async with anyio.create_task_group() as tasks:

            async def claim() -> None:
                claims.append(await pipe.stage("prompts").claim(1))

            claims = []
            tasks.start_soon(claim)
            await anyio.sleep(0.3)
            assert claims == []
            server.start()
        assert [lease.prompt_id for lease in claims[0].leases] == ["a"]


async def test_a_waiter_survives_a_restart_of_its_server(server, run_name, pipe_on):
    async with connect(server.url, run_name, reconnect_s=10) as connection:
        pipe = pipe_on(connection)
        waiter = pipe.stage("prompts")
        claim = await waiter.claim(1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(waiter.wait, claim)
            await anyio.sleep(1.1)
            server.kill()
            server.start()
            with anyio.fail_after(5):
                await pipe.feed("a")
        assert len((await waiter.claim(1)).leases) == 1


async def test_a_server_that_stays_down_is_an_error_without_the_password(server, run_name):
    redis = Redis.from_url(server.url)
    redis.config_set("requirepass", "opensesame")
    redis.close()
    url = server.url.replace("unix://", "unix://:opensesame@")
    async with connect(url, run_name, reconnect_s=0.5) as connection:
        server.kill()
        began = time.monotonic()
        with pytest.raises(ServerError, match=str(server.socket)) as caught:
            await connection.read_hash("meta")
        assert "opensesame" not in str(caught.value)
        assert time.monotonic() - began < 2


async def test_a_process_that_was_suspended_has_not_waited_for_the_server_meanwhile(redis_url, run_name, monkeypatch):
    monkeypatch.setattr("stream.connection.run_connection._ANSWER_TIMEOUT_S", 0.05)
    suspensions = iter([0.4])
    async with connect(redis_url, run_name, reconnect_s=0.3) as connection:

        async def call():
            for suspended_s in suspensions:
                until = time.monotonic() + suspended_s
                while time.monotonic() < until:
                    pass  # nothing else in this process runs
                await anyio.sleep_forever()
            return await connection.redis.ping()

        assert await connection.with_retry(call)


@pytest.mark.parametrize("url", ["unix://:opensesame@{}", "unix://{}?password=opensesame"])
async def test_no_error_shows_a_password(url, tmp_path):
    with pytest.raises(ServerError, match="did not answer") as caught:
        async with connect(url.format(tmp_path / "no.sock"), "run", reconnect_s=0.01):
            pass
    assert "opensesame" not in str(caught.value)


async def test_a_wrong_password_is_an_immediate_error(server, run_name):
    redis = Redis.from_url(server.url)
    redis.config_set("requirepass", "opensesame")
    redis.close()
    with anyio.fail_after(2), pytest.raises(ServerError, match="refuses access"):
        async with connect(server.url.replace("unix://", "unix://:wrong@"), run_name):
            pass


async def test_an_invalid_url_is_an_error():
    with pytest.raises(ServerError, match="is not a Redis URL"):
        async with connect("localhost:6379", "run"):
            pass


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
async def test_a_server_that_would_evict_work_is_refused(make_server, policy):
    server = make_server("--maxmemory-policy", policy).start()
    with pytest.raises(ServerError, match=f"{policy}.*noeviction"):
        async with connect(server.url, "run"):
            pass


async def test_an_old_server_is_refused(tmp_path):
    """The server is scripted to report an old version."""

    async def answer(client) -> None:
        async with client:
            while await client.receive():
                info = b"# Server\r\nredis_version:6.2.14\r\nrun_id:0\r\n"
                await client.send(b"$%d\r\n%s\r\n" % (len(info), info))

    listener = await anyio.create_unix_listener(tmp_path / "old.sock")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, answer)
        with pytest.raises(ServerError, match=r"6\.2\.14; Penstock needs Redis >= 7\.0"):
            async with connect(f"unix://{tmp_path / 'old.sock'}", "run", reconnect_s=1):
                pass
        tasks.cancel_scope.cancel()


async def test_a_cancelled_call_leaves_no_reply_for_the_next_one(pipe):
    """The reply to a cancelled call must not be read as the reply to the next one."""
    await pipe.feed(*(f"p{i}" for i in range(50)))
    stage = pipe.stage("groups")
    idle = await stage.claim(1)
    for i in range(100):
        with anyio.move_on_after(0.0002 * (i % 10)):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stage.wait, idle)
                tasks.start_soon(pipe.stage("prompts").claim, 1)
                tasks.start_soon(read_status, pipe.connection)
        assert await pipe.connection.read_hash("counts") == {"fed": "50"}


async def test_calls_wait_while_the_server_is_out_of_memory(server, run_name, pipe_on):
    """New payloads wait, while leases are renewed and the trainer, which frees memory, continues."""
    async with connect(server.url, run_name, reconnect_s=20) as connection:
        pipe = pipe_on(connection)
        await pipe.scored("a", "b")
        await pipe.feed("c", "d")
        worker, trainer = pipe.stage("prompts", lease_s=0.3), pipe.stage("scored", "trainer", lease_s=0.05)
        settling, buried = (await worker.claim(2)).leases
        await trainer.claim(1)
        trainer_lease = await TrainerLease.acquire(connection, 30.0)
        await connection.redis.config_set("maxmemory", 1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.complete, settling, "groups", pipe.group("c"))
            tasks.start_soon(worker.renew_leases)
            await anyio.sleep(0.6)
            assert list(worker.leases) == [settling.id, buried.id]
            leases = (await trainer.claim(2)).leases  # one of them expired
            assert (
                await trainer_lease.commit(
                    trainer, [EndedGroup(lease, Trained()) for lease in leases], release_version=1
                )
                == []
            )
            await trainer_lease.publish(await trainer_lease.reserve_version(0), server.socket, 1, {})
            await trainer_lease.acknowledge([lease.id for lease in leases])
            await worker.dead_letter(buried, "unreadable", "altered")
            assert (await read_status(connection)).stages["groups"].depth == 0
            await connection.redis.config_set("maxmemory", 0)
            while (await read_status(connection)).stages["groups"].depth == 0:
                await anyio.sleep(0.02)
            tasks.cancel_scope.cancel()
        assert await pipe.prompt_counts() == {"fed": 4, "trained": 2, "dropped": 0, "dead": 1, "outstanding": 1}


INFO_FIELDS = ["redis_version", "maxmemory_policy", "aof_enabled", "cluster_enabled"]


@pytest.mark.parametrize("missing", INFO_FIELDS)
async def test_a_field_that_info_does_not_have_is_unknown_and_is_logged(redis_url, run_name, monkeypatch, missing):
    async def info(*_sections):
        facts = {"redis_version": "7.2.0", "maxmemory_policy": "noeviction", "aof_enabled": 1, "cluster_enabled": 0}
        del facts[missing]
        return facts

    monkeypatch.setattr("redis.asyncio.Redis.info", lambda _client, *sections: info(*sections))
    with capture_logs() as logs:
        async with connect(redis_url, run_name):
            pass
    assert [line["field"] for line in logs if line["event"] == "redis.setting_unknown"] == [missing]


async def test_a_command_that_the_server_refuses_is_an_error_that_names_the_server(server, run_name):
    async with connect(server.url, run_name, reconnect_s=1) as connection:
        await connection.redis.set(connection.key("counts"), "of another program")
        with (
            pytest.raises(ServerError, match=rf"WRONGTYPE.*begin with {{{run_name}}}"),
            connection.explained_refusals(),
        ):
            await read_status(connection)
