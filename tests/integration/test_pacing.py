"""Pacing: the limit of outstanding groups, computed from the streams in the same step as the claim."""

import anyio
import pytest

from stream.operator.status import read_status
from stream.trainer.ledger import Ledger
from stream.trainer.ledger_records import AlreadyEnded, Dropped, LedgerRecord, Trained
from stream.trainer.trainer_lease import EndedGroup, TrainerLease


async def outstanding(pipe) -> int:
    return (await read_status(pipe.connection)).outstanding


async def test_claimed_unscored_and_untrained_groups_use_capacity(pipe):
    await pipe.feed(*"abcdef")
    rollout, score = pipe.stage("prompts", capacity=3), pipe.stage("groups")
    first, second, _third = (await rollout.claim(10)).leases
    assert (await rollout.claim(10)).leases == []
    await rollout.complete(first, "groups", pipe.group("a"))
    await rollout.complete(second, "groups", pipe.group("b"))
    (lease,) = (await score.claim(1)).leases
    await score.complete(lease, "scored", pipe.group("a"))
    assert (await rollout.claim(10)).leases == []
    assert await outstanding(pipe) == 3


async def test_a_released_prompt_frees_capacity(pipe):
    await pipe.feed(*"abc")
    rollout = pipe.stage("prompts", capacity=2, backoff_s=10.0)
    lease, _ = (await rollout.claim(10)).leases
    await rollout.release(lease, "infra", "no tool server")
    assert [each.prompt_id for each in (await rollout.claim(10)).leases] == ["c"]


async def test_a_released_prompt_waits_for_capacity(pipe):
    await pipe.feed("a", "b")
    rollout, other = pipe.stage("prompts", capacity=1), pipe.stage("prompts", "other", capacity=1)
    (lease,) = (await rollout.claim(1)).leases
    await rollout.release(lease, "none", "")
    (lease,) = (await other.claim(2)).leases
    assert (await rollout.claim(2)).leases == []
    await other.dead_letter(lease, "unreadable", "")
    assert len((await rollout.claim(2)).leases) == 1


async def test_expired_leases_are_reclaimed_without_free_capacity(pipe):
    await pipe.feed(*"abc")
    await pipe.stage("prompts", "dead", capacity=2, lease_s=0.05).claim(2)
    await anyio.sleep(0.06)
    claim = await pipe.stage("prompts", "next", capacity=1).claim(5)
    assert sorted(lease.prompt_id for lease in claim.leases) == ["a", "b"]


async def test_concurrent_claimers_never_exceed_the_capacity(pipe):
    await pipe.feed(*(f"p{i}" for i in range(200)))
    seen = []

    async def work(name: str) -> None:
        rollout = pipe.stage("prompts", name, capacity=7)
        for _ in range(10):
            claim = await rollout.claim(3)
            seen.append(await outstanding(pipe))
            for lease in claim.leases:
                await rollout.release(lease, "none", "")

    async with anyio.create_task_group() as tasks:
        for i in range(6):
            tasks.start_soon(work, f"w{i}")
    assert max(seen) == 7


@pytest.fixture
async def trainer_lease(pipe):
    return await TrainerLease.acquire(pipe.connection, 30.0)


async def test_a_trained_group_frees_capacity_when_its_version_is_published(pipe, trainer_lease, tmp_path):
    await pipe.scored("a")
    await pipe.feed("b")
    rollout, trainer = pipe.stage("prompts", capacity=1), pipe.stage("scored", "trainer")
    (lease,) = (await trainer.claim(1)).leases
    await trainer_lease.commit(trainer, [EndedGroup(lease, Trained())], release_version=1)
    await trainer_lease.publish(0, tmp_path, 0, {})
    assert (await rollout.claim(1)).leases == []
    waiting = await rollout.claim(1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rollout.wait, waiting)
        await trainer_lease.publish(1, tmp_path, 1, {})
    assert len((await rollout.claim(1)).leases) == 1


async def test_a_checkpoint_between_two_versions_frees_no_capacity(pipe, trainer_lease, tmp_path):
    await pipe.scored("a")
    await pipe.feed("b")
    rollout, trainer = pipe.stage("prompts", capacity=1), pipe.stage("scored", "trainer")
    (lease,) = (await trainer.claim(1)).leases
    await trainer_lease.commit(trainer, [EndedGroup(lease, Trained())], release_version=1)
    await trainer_lease.acknowledge([lease.id])
    assert (await read_status(pipe.connection)).stages["scored"].depth == 0
    assert (await rollout.claim(1)).leases == []
    await trainer_lease.publish(1, tmp_path, 1, {})
    assert len((await rollout.claim(1)).leases) == 1


@pytest.mark.parametrize("ending", [Dropped("zero_variance"), AlreadyEnded(Trained())])
async def test_a_dropped_group_frees_capacity_immediately(pipe, trainer_lease, ending):
    await pipe.scored("a")
    await pipe.feed("b")
    trainer = pipe.stage("scored", "trainer")
    (lease,) = (await trainer.claim(1)).leases
    await trainer_lease.commit(trainer, [EndedGroup(lease, ending)], release_version=1)
    assert len((await pipe.stage("prompts", capacity=1).claim(1)).leases) == 1


@pytest.mark.parametrize("discarded", [0, 1, 3])
async def test_discarded_groups_free_as_much_capacity_as_they_used(pipe, trainer_lease, discarded):
    await pipe.scored(*"abcd")
    await pipe.feed(*"efghij")
    rollout, trainer = pipe.stage("prompts", capacity=4), pipe.stage("scored", "trainer")
    leases = (await trainer.claim(4)).leases
    assert (await rollout.claim(9)).leases == []
    await trainer_lease.commit(
        trainer, [EndedGroup(lease, Dropped("zero_variance")) for lease in leases[:discarded]], release_version=1
    )
    assert len((await rollout.claim(9)).leases) == discarded
    assert (await rollout.claim(9)).leases == []
    await pipe.prompt_counts()


async def test_a_dead_letter_frees_capacity_immediately(pipe):
    await pipe.rolled_out("a")
    await pipe.feed("b")
    score = pipe.stage("groups")
    (lease,) = (await score.claim(1)).leases
    await score.dead_letter(lease, "unreadable", "altered")
    assert len((await pipe.stage("prompts", capacity=1).claim(1)).leases) == 1


async def test_a_requeued_group_uses_capacity_again(pipe, trainer_lease, tmp_path):
    await pipe.scored("a", "b")
    trainer = pipe.stage("scored", "trainer")
    leases = (await trainer.claim(2)).leases
    await trainer_lease.commit(trainer, [EndedGroup(lease, Trained()) for lease in leases], release_version=1)
    await trainer_lease.publish(1, tmp_path, 1, {})
    assert await outstanding(pipe) == 0
    ledger = await anyio.to_thread.run_sync(Ledger, tmp_path / "ledger")
    await anyio.to_thread.run_sync(ledger.append, [LedgerRecord("a", Trained(), 1, 0, "")])
    await trainer_lease.recover(ledger)
    ledger.close()
    assert await outstanding(pipe) == 1
