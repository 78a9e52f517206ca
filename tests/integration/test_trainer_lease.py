"""The trainer's lease: fencing, commits, acknowledgement, recovery."""

import os
import subprocess
import sys
import time

import anyio
import pytest

from stream.errors import FencedError, RunMismatchError, ServerError
from stream.operator.dead_letters import drop_dead_letters, list_dead_letters
from stream.operator.status import read_status
from stream.queue.feed import Feed
from stream.records import Prompt
from stream.trainer.ledger import Ledger
from stream.trainer.ledger_records import (
    AlreadyEnded,
    Dropped,
    Duplicate,
    GroupOutcome,
    LedgerOutcome,
    LedgerRecord,
    Trained,
)
from stream.trainer.trainer_lease import EndedGroup, TrainerLease

TRAINED = Trained()


@pytest.fixture
def ledger(tmp_path):
    result = Ledger(tmp_path / "ledger.jsonl")
    yield result
    result.close()


def line(prompt: str, outcome: LedgerOutcome = TRAINED) -> LedgerRecord:
    return LedgerRecord(prompt, outcome, 1, 0, "")


async def hold(ledger: Ledger, lines: list[LedgerRecord]) -> None:
    await anyio.to_thread.run_sync(ledger.append, lines)


async def train(pipe, trainer_lease, ends: dict[str, GroupOutcome], ledger: Ledger | None = None) -> list[str]:
    """Claim scored groups and end them; return their entry ids."""
    trainer = pipe.stage("scored", f"trainer-{trainer_lease.token}")
    leases = (await trainer.claim(100)).leases
    mine = [EndedGroup(lease, ends[lease.prompt_id]) for lease in leases if lease.prompt_id in ends]
    if ledger is not None:
        await hold(
            ledger, [line(end.lease.prompt_id, end.outcome) for end in mine if isinstance(end.outcome, LedgerOutcome)]
        )
    assert await trainer_lease.commit(trainer, mine, release_version=1) == []
    return [end.lease.id for end in mine]


async def test_a_second_trainer_is_refused_while_the_first_renews(pipe):
    first = await TrainerLease.acquire(pipe.connection, 0.3)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(first.renew_forever)
        with pytest.raises(FencedError, match=rf"^process {os.getpid()} on \S+ trains run .* already"):
            await TrainerLease.acquire(pipe.connection, 0.3)
        assert await first.reserve_version(0) == 1
        tasks.cancel_scope.cancel()


async def test_a_silent_trainer_is_replaced_after_its_lease(pipe):
    began = time.monotonic()
    await TrainerLease.acquire(pipe.connection, 0.4)
    await TrainerLease.acquire(pipe.connection, 0.4)
    assert 0.35 < time.monotonic() - began < 1.0


async def test_a_trainer_whose_process_has_exited_is_replaced_immediately(pipe, redis_url):
    code = f"""
import anyio, os
from stream.connection.run_connection import connect
from stream.trainer.trainer_lease import TrainerLease

async def main():
    async with connect({redis_url!r}, {pipe.connection.run!r}) as connection:
        await TrainerLease.acquire(connection, 600.0)
        os.kill(os.getpid(), 9)
anyio.run(main)
"""
    killed = await anyio.to_thread.run_sync(
        lambda: subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL)
    )
    assert killed.returncode == -9
    with anyio.fail_after(1):
        await TrainerLease.acquire(pipe.connection, 0.3)


async def test_a_released_lease_can_be_acquired_immediately(pipe):
    first = await TrainerLease.acquire(pipe.connection, 600.0)
    await first.release()
    with anyio.fail_after(1):
        await TrainerLease.acquire(pipe.connection, 600.0)


async def test_every_operation_of_a_fenced_trainer_is_refused(pipe, ledger, tmp_path):
    await pipe.scored("a")
    zombie = await TrainerLease.acquire(pipe.connection, 0.05)
    trainer = pipe.stage("scored", "zombie")
    (lease,) = (await trainer.claim(1)).leases
    await anyio.sleep(0.06)
    heir = await TrainerLease.acquire(pipe.connection, 30.0)
    for verb in (
        zombie.commit(trainer, [EndedGroup(lease, Trained())], release_version=1),
        zombie.acknowledge([lease.id]),
        zombie.reserve_version(0),
        zombie.publish(1, tmp_path, 1, {}),
        zombie.finish_run("done"),
        zombie.recover(ledger),
    ):
        with pytest.raises(FencedError, match="another trainer has taken over"):
            await verb
    with anyio.fail_after(1), pytest.raises(FencedError):
        await zombie.renew_forever()
    await zombie.release()  # releases a lease that it no longer has
    assert (await read_status(pipe.connection)).policy["owner"]
    assert (await read_status(pipe.connection)).counts == {"fed": 1}
    assert (await read_status(pipe.connection)).version == -1
    assert await heir.recover(ledger) == 0
    assert await train(pipe, heir, {"a": Trained()})


async def test_after_losing_writes_the_server_still_prefers_the_newer_trainer(pipe):
    old = await TrainerLease.acquire(pipe.connection, 0.01)
    await anyio.sleep(0.02)
    young = await TrainerLease.acquire(pipe.connection, 30.0)
    await pipe.connection.redis.hset(pipe.connection.key("policy"), "fence", old.token)
    assert await young.reserve_version(0) == 1
    with pytest.raises(FencedError):
        await old.reserve_version(0)


async def test_an_emptied_server_is_not_mistaken_for_another_trainer(pipe):
    trainer_lease = await TrainerLease.acquire(pipe.connection, 30.0)
    await pipe.connection.redis.delete(pipe.connection.key("policy"))
    with pytest.raises(ServerError, match="does not know run"):
        await trainer_lease.reserve_version(0)
    heir = await TrainerLease.acquire(pipe.connection, 30.0)
    assert heir.token > trainer_lease.token


async def test_a_token_is_larger_than_the_folders_even_if_the_servers_clock_is_behind(pipe):
    ahead = 2**52
    assert (await TrainerLease.acquire(pipe.connection, 0.01, min_token=ahead)).token == ahead + 1


async def test_a_marked_group_stays_until_it_is_acknowledged(pipe):
    await pipe.scored("a", "b", "c")
    trainer_lease = await TrainerLease.acquire(pipe.connection, 30.0)
    marked = await train(pipe, trainer_lease, {"a": Trained(), "b": Dropped("stale"), "c": Trained()})
    status = await read_status(pipe.connection)
    assert (status.stages["scored"].depth, status.stages["scored"].marked, status.unfinished) == (3, 3, 0)
    assert status.counts == {"fed": 3, "trained": 2, "dropped:stale": 1}
    assert (await pipe.stage("scored", "other").claim(10)).leases == []
    await trainer_lease.acknowledge(marked[:2])
    await trainer_lease.acknowledge(marked)  # a reply was lost
    assert (await read_status(pipe.connection)).stages["scored"].depth == 0
    assert await pipe.connection.redis.hlen(pipe.connection.key("scored:marked")) == 0
    await pipe.prompt_counts()


async def test_marks_outlive_every_lease(pipe):
    await pipe.scored("a")
    trainer_lease = await TrainerLease.acquire(pipe.connection, 30.0)
    trainer = pipe.stage("scored", "trainer", lease_s=0.02)
    (lease,) = (await trainer.claim(1)).leases
    await trainer_lease.commit(trainer, [EndedGroup(lease, Trained())], release_version=1)
    assert trainer.leases == {}
    await anyio.sleep(0.03)
    assert (await pipe.stage("scored", "other").claim(10)).leases == []


async def test_a_commit_repeated_after_a_lost_reply_is_one_commit(pipe):
    await pipe.scored("a")
    trainer_lease = await TrainerLease.acquire(pipe.connection, 30.0)
    trainer = pipe.stage("scored", "trainer")
    ends = [EndedGroup(lease, Trained()) for lease in (await trainer.claim(1)).leases]
    for _ in range(2):
        assert await trainer_lease.commit(trainer, ends, release_version=1) == []
    assert (await read_status(pipe.connection)).counts == {"fed": 1, "trained": 1}


async def test_a_commit_returns_entries_whose_lease_was_lost(pipe):
    await pipe.scored("a", "b")
    trainer_lease = await TrainerLease.acquire(pipe.connection, 30.0)
    trainer = pipe.stage("scored", "trainer", lease_s=0.05)
    kept, lost = (await trainer.claim(2)).leases
    await anyio.sleep(0.06)
    taken = (await pipe.stage("scored", "other").claim(1)).leases
    kept, lost = (lost, kept) if taken[0].id == kept.id else (kept, lost)
    answer = await trainer_lease.commit(
        trainer, [EndedGroup(kept, Trained()), EndedGroup(lost, Trained())], release_version=1
    )
    assert answer == [lost.id]
    assert await pipe.prompt_counts() == {"fed": 2, "trained": 1, "dropped": 0, "dead": 0, "outstanding": 1}


async def test_version_numbers_are_never_used_twice(pipe):
    first = await TrainerLease.acquire(pipe.connection, 30.0)
    assert [await first.reserve_version(-1), await first.reserve_version(-1)] == [0, 1]
    await first.release()
    second = await TrainerLease.acquire(pipe.connection, 30.0)
    assert await second.reserve_version(0) == 2
    assert await second.reserve_version(17) == 18  # engines or checkpoints have versions that the server lost


async def test_a_published_version_is_not_reserved_again_though_the_server_lost_its_reservation(connection, tmp_path):
    first = await TrainerLease.acquire(connection, 30)
    assert [await first.reserve_version(-1), await first.reserve_version(-1)] == [0, 1]
    await connection.redis.hset(connection.key("policy"), "next", 0)  # a power failure, between push and publication
    await first.publish(1, tmp_path, 1, {})
    await first.release()
    second = await TrainerLease.acquire(connection, 30)  # from a checkpoint of version 0
    assert await second.reserve_version(0) == 2


async def test_the_published_policy_is_readable(pipe, tmp_path):
    trainer_lease = await TrainerLease.acquire(pipe.connection, 30.0)
    assert (await read_status(pipe.connection)).version == -1
    await trainer_lease.publish(3, tmp_path / "v3", 12, {"reward": 0.5, "odd": float("nan")})
    status = await read_status(pipe.connection)
    assert (status.version, status.policy["path"], status.policy["step"]) == (3, str(tmp_path / "v3"), "12")
    assert (await pipe.stage("prompts").claim(1)).version == 3
    assert (await read_status(pipe.connection)).metrics == {"reward": 0.5, "odd": None}


async def test_recovery_acknowledges_recorded_groups_and_requeues_the_others(pipe, ledger):
    await pipe.scored("a", "b", "c", "d")
    dead = await TrainerLease.acquire(pipe.connection, 0.01)
    await train(pipe, dead, {"a": Trained(), "b": Dropped("stale"), "c": Trained(), "d": Trained()})
    await anyio.sleep(0.02)
    await hold(ledger, [line("a"), line("b", Dropped("stale"))])  # the checkpoint is older than the steps of c and d
    heir = await TrainerLease.acquire(pipe.connection, 30.0)
    assert await heir.recover(ledger) == 2
    status = await read_status(pipe.connection)
    assert (status.counts, status.unfinished) == ({"fed": 4, "trained": 1, "dropped:stale": 1}, 2)
    await pipe.prompt_counts()
    claim = await pipe.stage("scored", "heir").claim(10)
    assert sorted(lease.prompt_id for lease in claim.leases) == ["c", "d"]


async def test_recovery_requeues_groups_leased_by_the_dead_trainer(pipe, ledger):
    await pipe.scored("a", "b")
    await TrainerLease.acquire(pipe.connection, 0.01)
    await pipe.stage("scored", "dead").claim(2)
    await anyio.sleep(0.02)
    heir = await TrainerLease.acquire(pipe.connection, 30.0)
    assert await heir.recover(ledger) == 0
    assert len((await pipe.stage("scored", "heir").claim(10)).leases) == 2


async def test_recovering_twice_has_the_effect_of_once(pipe, ledger):
    await pipe.scored("a", "b")
    trainer_lease = await TrainerLease.acquire(pipe.connection, 30.0)
    await train(pipe, trainer_lease, {"a": Trained(), "b": Trained()}, ledger)
    ledger.outcomes.pop("b")
    await trainer_lease.recover(ledger)
    await trainer_lease.recover(ledger)
    assert await pipe.prompt_counts() == {"fed": 2, "trained": 1, "dropped": 0, "dead": 0, "outstanding": 1}


async def test_recovery_handles_many_marks(pipe, ledger):
    names = [f"p{i}" for i in range(1200)]
    await pipe.scored(*names)
    trainer_lease = await TrainerLease.acquire(pipe.connection, 30.0)
    trainer = pipe.stage("scored", "trainer")
    leases = (await trainer.claim(1200)).leases
    await trainer_lease.commit(trainer, [EndedGroup(lease, Trained()) for lease in leases], release_version=1)
    await hold(ledger, [line(name) for name in names[:600]])
    assert await trainer_lease.recover(ledger) == 600
    assert await pipe.prompt_counts() == {"fed": 1200, "trained": 600, "dropped": 0, "dead": 0, "outstanding": 600}


async def test_recovery_keeps_prompts_dropped_by_the_operator(pipe, ledger):
    await pipe.feed("a")
    worker = pipe.stage("prompts")
    await worker.dead_letter((await worker.claim(1)).leases[0], "unreadable", "altered")
    await drop_dead_letters(pipe.connection, [letter.id for letter in await list_dead_letters(pipe.connection)])
    trainer_lease = await TrainerLease.acquire(pipe.connection, 30.0)
    await trainer_lease.recover(ledger)
    assert (await read_status(pipe.connection)).dropped == {"operator": 1}


async def test_a_duplicate_of_a_group_that_was_trained_counts_as_one(pipe, ledger):
    """P21: after the group has ended."""
    await pipe.scored("a")
    await pipe.connection.redis.xadd(pipe.connection.key("scored"), {"prompt": "a", "payload": "again"})
    trainer_lease = await TrainerLease.acquire(pipe.connection, 30.0)
    trainer = pipe.stage("scored", "trainer")
    first, second = (await trainer.claim(2)).leases
    await trainer_lease.commit(
        trainer, [EndedGroup(first, Trained()), EndedGroup(second, AlreadyEnded(Trained()))], release_version=1
    )
    assert (await read_status(pipe.connection)).counts == {"fed": 1, "trained": 1, "duplicates": 1}
    await pipe.prompt_counts()


async def test_a_duplicate_uses_no_capacity_and_ends_nothing(pipe, ledger):
    """P21: before the group has ended."""
    await pipe.scored("a")
    await pipe.connection.redis.xadd(pipe.connection.key("scored"), {"prompt": "a", "payload": "again"})
    trainer_lease = await TrainerLease.acquire(pipe.connection, 30.0)
    trainer = pipe.stage("scored", "trainer")
    second, first = (await trainer.claim(2)).leases
    await trainer_lease.commit(trainer, [EndedGroup(second, Duplicate(first.id))], release_version=1)
    status = await read_status(pipe.connection)
    assert (status.counts, status.unfinished, status.outstanding) == ({"fed": 1, "duplicates": 1}, 1, 1)
    await trainer_lease.commit(trainer, [EndedGroup(first, Trained())], release_version=1)
    await pipe.prompt_counts()
    await trainer_lease.recover(ledger)  # the ledger is from before the step, so both are requeued
    assert len((await pipe.stage("scored", "trainer-2").claim(5)).leases) == 2
    await pipe.prompt_counts()


async def test_an_outcome_that_the_server_lost_is_counted_again(pipe, ledger):
    """The ledger has the outcome, the server has lost it, so the group is delivered again."""
    await pipe.scored("a")
    trainer_lease = await TrainerLease.acquire(pipe.connection, 30.0)
    await train(pipe, trainer_lease, {"a": AlreadyEnded(Trained())})
    assert (await read_status(pipe.connection)).counts == {"fed": 1, "trained": 1}
    await pipe.prompt_counts()


async def test_an_outcome_that_the_server_lost_is_not_counted_twice_by_a_new_trainer(pipe, ledger):
    await pipe.scored("a", "b")
    await hold(ledger, [line("a")])
    trainer_lease = await TrainerLease.acquire(pipe.connection, 30.0)
    await trainer_lease.recover(ledger)
    assert await pipe.prompt_counts() == {"fed": 2, "trained": 1, "dropped": 0, "dead": 0, "outstanding": 1}
    await train(pipe, trainer_lease, {"a": AlreadyEnded(Trained())})
    assert (await read_status(pipe.connection)).counts == {"fed": 2, "trained": 1, "duplicates": 1}
    assert await pipe.prompt_counts() == {"fed": 2, "trained": 1, "dropped": 0, "dead": 0, "outstanding": 1}


async def test_a_ledger_without_acknowledged_groups_is_refused(pipe, ledger):
    await pipe.scored("a", "b")
    trainer_lease = await TrainerLease.acquire(pipe.connection, 30.0)
    await trainer_lease.acknowledge(await train(pipe, trainer_lease, {"a": Trained(), "b": Trained()}))
    with pytest.raises(RunMismatchError, match="2 prompts of run"):
        await trainer_lease.recover(ledger)


async def test_a_run_is_rebuilt_from_its_ledger_on_an_emptied_server(pipe, ledger):
    await hold(ledger, [line("a"), line("b", Dropped("stale"))])
    trainer_lease = await TrainerLease.acquire(pipe.connection, 30.0)
    await trainer_lease.recover(ledger)
    await pipe.feed("c")  # the feeder restarts, and counts prompts in the ledger
    assert await pipe.prompt_counts() == {"fed": 1, "trained": 0, "dropped": 0, "dead": 0, "outstanding": 1}
    feed, passed = Feed(pipe.connection, 10), [Prompt(id=name, messages=[]) for name in "ab"]
    await feed.put(passed, await feed.cursor(), "3", ended={"a": "trained", "b": "dropped:stale"})
    assert await pipe.prompt_counts() == {"fed": 3, "trained": 1, "dropped": 1, "dead": 0, "outstanding": 1}


async def test_recovery_stores_the_ledgers_length(pipe, tmp_path):
    def cut_to_a_line() -> tuple[Ledger, int]:
        ledger = Ledger(tmp_path / "cut.jsonl")
        ledger.append([line("a")])
        length = ledger.sync()
        ledger.append([line("b")])
        ledger.close()
        return Ledger(ledger.path, length), length

    cut, length = await anyio.to_thread.run_sync(cut_to_a_line)
    trainer_lease = await TrainerLease.acquire(pipe.connection, 30.0)
    await trainer_lease.recover(cut)
    cut.close()
    assert (await read_status(pipe.connection)).policy["ledger"] == str(length)


async def test_every_claim_reports_the_end_of_the_run(pipe, ledger):
    trainer_lease = await TrainerLease.acquire(pipe.connection, 30.0)
    claim = await pipe.stage("prompts").claim(1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pipe.stage("prompts").wait, claim)
        with anyio.fail_after(1):
            await trainer_lease.finish_run("trained 3 steps")
    assert (await pipe.stage("prompts").claim(1)).finish_reason == "trained 3 steps"
    await trainer_lease.recover(ledger)
    assert (await pipe.stage("prompts").claim(1)).finish_reason == ""
