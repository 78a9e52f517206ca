"""Records of groups are keys of their own, each owned by one entry, or by one dead letter."""

import pytest

from stream.codec import decode, encode
from stream.errors import LeaseLostError, RecordError
from stream.operator.dead_letters import drop_dead_letters, list_dead_letters, retry_dead_letters
from stream.operator.unfinished_groups import find_unfinished_group
from stream.records import Group, RewardPart, Scores
from stream.trainer.ledger_records import Trained
from stream.trainer.trainer_lease import EndedGroup, TrainerLease
from stream.validity import Measured
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


def with_scores(group, text="noted"):
    (completion,) = group.completions
    completion.parts = [RewardPart(name="f", reward=Measured(0.25), weight=2.0)]
    completion.reward, completion.extra = Measured(0.5), {"why": text}
    group.logged_metrics = {"length": [3.0]}
    group.score_claimed_at, group.scored_at = 12.0, 13.5
    return group


async def test_a_scored_group_is_the_rollouts_record_with_its_scores(pipe):
    await pipe.rolled_out("a")
    scorer, trainer = pipe.stage("groups", "scorer"), pipe.stage("scored", "trainer")
    (lease,) = (await scorer.claim(1)).leases
    group = with_scores(lease.group())
    await scorer.complete_scored(lease, group)
    (scored,) = (await trainer.claim(1)).leases
    assert scored.payload == lease.payload  # nothing of the rollout was sent again
    assert scored.group() == decode(scored.record(), Group) == group
    assert await find_unfinished_group(pipe.connection, "a") == ("scored", group)
    await trainer.dead_letter(scored, "data", "altered")
    (letter,) = await list_dead_letters(pipe.connection)
    assert decode(letter.payload, Group) == group
    await retry_dead_letters(pipe.connection, [letter.id])
    (again,) = (await trainer.claim(1)).leases
    assert again.group() == group
    assert await assert_records_are_owned(pipe.connection) == 1


async def test_scores_of_a_worker_without_its_lease_change_nothing(pipe):
    await pipe.rolled_out("a")
    first = pipe.stage("groups", "first")
    (lease,) = (await first.claim(1)).leases
    await first.release(lease, "none", "")
    (again,) = (await pipe.stage("groups", "second").claim(1)).leases
    with pytest.raises(LeaseLostError):
        await first.complete_scored(lease, with_scores(pipe.group("a")))
    assert again.group() == pipe.group("a")
    assert await pipe.connection.redis.xlen(pipe.connection.key("scored")) == 0
    assert await assert_records_are_owned(pipe.connection) == 1


@pytest.mark.parametrize("why", ["long scores", "no record on the server"])
async def test_scores_that_cannot_stand_beside_the_record_are_stored_with_it(pipe, why):
    await pipe.rolled_out("a")
    scorer = pipe.stage("groups", "scorer")
    (lease,) = (await scorer.claim(1)).leases
    group = with_scores(lease.group(), text="x" * (100_000 if why == "long scores" else 1))
    if why == "no record on the server":
        await pipe.connection.redis.unlink(pipe.connection.key(f"groups:payload:{lease.id}"))
    await scorer.complete_scored(lease, group)
    (scored,) = (await pipe.stage("scored", "trainer").claim(1)).leases
    assert scored.scores == b""
    assert scored.group() == group
    assert await assert_records_are_owned(pipe.connection) == 1


@pytest.mark.parametrize("scores", [b"junk", encode(Scores(completions=[]))])
async def test_scores_that_do_not_belong_to_the_record_make_the_entry_unreadable(pipe, scores):
    await pipe.rolled_out("a")
    (lease,) = (await pipe.stage("groups").claim(1)).leases
    lease.scores = scores
    with pytest.raises(RecordError):
        lease.group()


@pytest.mark.parametrize("stage", ["groups", "scored"])
async def test_a_dead_letter_owns_its_record(pipe, stage):
    await {"groups": pipe.rolled_out, "scored": pipe.scored}[stage]("a")
    worker = pipe.stage(stage, "worker")
    for resolve in (retry_dead_letters, drop_dead_letters):
        (lease,) = (await worker.claim(1)).leases
        assert lease.group() == pipe.group("a")
        await worker.dead_letter(lease, "data", "altered")
        (letter,) = await list_dead_letters(pipe.connection)
        assert letter.payload == lease.record()
        assert await assert_records_are_owned(pipe.connection) == 1
        await resolve(pipe.connection, [letter.id])
    assert await assert_records_are_owned(pipe.connection) == 0


async def test_a_rebuilt_server_has_no_old_records(pipe):
    await pipe.rolled_out("a")
    await pipe.scored("b")
    trainer = await TrainerLease.acquire(pipe.connection, 60.0)
    assert await pipe.connection.run_script("rebuild", trainer.token, 0) == 1
    assert await assert_records_are_owned(pipe.connection) == 0
