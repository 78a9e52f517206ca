"""The run's status: complete, atomic and read-only."""

from stream.connection.run_connection import connect
from stream.operator.run_status import read_status
from stream.trainer.lease import EndedGroup, TrainerLease
from stream.trainer.outcomes import Trained


async def dump(connection) -> dict[bytes, bytes]:
    keys = sorted([key async for key in connection.redis.scan_iter(f"{{{connection.run}}}*")])
    return {key: await connection.redis.dump(key) for key in keys}


async def busy_run(pipe, tmp_path) -> None:
    """Create one group in every state."""
    await pipe.scored("trained", "waiting")
    await pipe.rolled_out("unscored")
    await pipe.feed("claimed", "delayed", "dead", "unclaimed")
    trainer_lease = await TrainerLease.acquire(pipe.connection, 30.0)
    trainer = pipe.stage("scored", "trainer")
    (lease,) = (await trainer.claim(1)).leases
    await trainer_lease.commit(trainer, [EndedGroup(lease, Trained())], release_version=1)
    await trainer_lease.publish(0, tmp_path, 0, {"reward": 1.0})
    worker = pipe.stage("prompts", "worker", backoff_s=100.0)
    _claimed, delayed, dead = (await worker.claim(3)).leases
    await worker.release(delayed, "infra", "no tool server")
    await worker.dead_letter(dead, "unreadable", "altered")


async def test_the_status_has_every_state(pipe, tmp_path):
    await busy_run(pipe, tmp_path)
    view = await read_status(pipe.connection)
    prompts, groups, scored = (view.stages[name] for name in ("prompts", "groups", "scored"))
    assert (prompts.depth, prompts.claimed, prompts.delayed, prompts.lag) == (3, 1, 1, 1)
    assert prompts.consumers == {"worker": 1}
    assert (groups.depth, groups.lag, groups.consumers) == (1, 1, {})
    assert (scored.depth, scored.marked, scored.lag) == (2, 1, 1)
    assert view.outstanding == 4  # claimed, unscored, waiting, and trained for an unpublished version
    assert (view.unfinished, view.dead, view.version, view.metrics) == (5, 1, 0, {"reward": 1.0})
    assert view.balance == {"fed": 7, "trained": 1, "dropped": 0, "dead": 1, "outstanding": 5}
    assert 0 <= prompts.oldest_age_ms < 10_000


async def test_reading_the_status_changes_nothing(pipe, tmp_path, redis_url):
    await busy_run(pipe, tmp_path)
    before = await dump(pipe.connection)
    async with connect(redis_url, pipe.connection.run, create=False) as visitor:
        for _ in range(3):
            await read_status(visitor)
    assert await dump(pipe.connection) == before
