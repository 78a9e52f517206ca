"""Records of groups are keys of their own, each owned by one entry, or by one dead letter."""

import pytest

from stream.errors import LeaseLostError
from stream.operator.dead_letters import drop_dead_letters, list_dead_letters, retry_dead_letters
from stream.trainer.lease import EndedGroup, TrainerLease
from stream.trainer.outcomes import Trained
from tests.cases.records import assert_records_are_owned


async def test_a_record_is_kept_until_its_entry_ends(pipe):
    await pipe.scored("a", "b")
    await assert_records_are_owned(pipe.connection)
    scored = pipe.stage("scored", "trainer")
    leases = (await scored.claim(2)).leases
    assert [lease.group() for lease in leases] == [pipe.group("a"), pipe.group("b")]
    keys = [pipe.connection.key(f"scored:payload:{lease.id}") for lease in leases]
    assert [await pipe.connection.redis.ttl(key) for key in keys] == [-1, -1]
    trainer = await TrainerLease.acquire(pipe.connection, 60.0)
    await trainer.commit(scored, [EndedGroup(lease, Trained()) for lease in leases], release_version=1)
    assert await pipe.connection.redis.exists(*keys) == 2
    await trainer.acknowledge([lease.id for lease in leases])
    assert await assert_records_are_owned(pipe.connection) == 0


async def test_a_worker_without_its_lease_leaves_nothing(pipe):
    await pipe.feed("a")
    first = pipe.stage("prompts", "first")
    (lease,) = (await first.claim(1)).leases
    await first.release(lease, "none", "")
    (again,) = (await pipe.stage("prompts", "second").claim(1)).leases
    with pytest.raises(LeaseLostError):
        await first.complete(lease, "groups", pipe.group("a"))
    assert again.prompt_id == "a"
    assert await assert_records_are_owned(pipe.connection) == 0


async def test_without_its_record_a_group_is_not_added(pipe):
    await pipe.feed("a")
    worker = pipe.stage("prompts")
    (lease,) = (await worker.claim(1)).leases
    assert await pipe.connection.run_script("complete", "prompts", "w", lease.id, "groups", "a", "expired") == -1
    await worker.complete(lease, "groups", pipe.group("a"))  # still held
    assert await assert_records_are_owned(pipe.connection) == 1


@pytest.mark.parametrize("stage", ["groups", "scored"])
async def test_a_dead_letter_owns_its_record(pipe, stage):
    await {"groups": pipe.rolled_out, "scored": pipe.scored}[stage]("a")
    worker = pipe.stage(stage, "worker")
    for resolve in (retry_dead_letters, drop_dead_letters):
        (lease,) = (await worker.claim(1)).leases
        assert lease.group() == pipe.group("a")
        await worker.dead_letter(lease, "data", "altered")
        (letter,) = await list_dead_letters(pipe.connection)
        assert letter.payload == lease.payload
        assert await assert_records_are_owned(pipe.connection) == 1
        await resolve(pipe.connection, [letter.id])
    assert await assert_records_are_owned(pipe.connection) == 0


async def test_a_rebuilt_server_has_no_old_records(pipe):
    await pipe.rolled_out("a")
    await pipe.scored("b")
    trainer = await TrainerLease.acquire(pipe.connection, 60.0)
    assert await pipe.connection.run_script("rebuild", trainer.token, 0) == 1
    assert await assert_records_are_owned(pipe.connection) == 0
