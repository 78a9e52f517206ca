"""A script runs but its reply is lost: the call is repeated, and the run's state is the same."""

from contextlib import asynccontextmanager, suppress

import anyio
import pytest

from stream.connection.run_connection import connect
from stream.errors import LeaseLostError, PenstockError
from stream.operator.control import pause, resume
from stream.operator.dead_letters import drop_dead_letters, list_dead_letters, retry_dead_letters
from stream.operator.status import read_status
from stream.trainer.ledger_records import Dropped, Trained
from stream.trainer.trainer_lease import EndedGroup, TrainerLease
from tests.soak.proxy import Fault, Proxy, address_of


async def feed(pipe, lose, folder):
    lose()
    await pipe.feed("a")


async def settle(pipe, lose, folder):
    await pipe.feed("a", "b")
    worker = pipe.stage("prompts")
    lease, _ = (await worker.claim(2)).leases
    lose()
    with suppress(LeaseLostError):  # it is completed, but the caller does not know
        await worker.complete(lease, "groups", pipe.group("a"))


async def release(pipe, lose, folder):
    await pipe.feed("a")
    worker = pipe.stage("prompts", backoff_s=50.0)
    (lease,) = (await worker.claim(1)).leases
    lose()
    with suppress(LeaseLostError):
        await worker.release(lease, "infra", "no tool server")


async def bury(pipe, lose, folder):
    await pipe.rolled_out("a")
    worker = pipe.stage("groups")
    (lease,) = (await worker.claim(1)).leases
    lose()
    with suppress(LeaseLostError):
        await worker.dead_letter(lease, "unreadable", "altered")


async def commit(pipe, lose, folder):
    await pipe.scored("a", "b")
    trainer_lease, trainer = await TrainerLease.acquire(pipe.connection, 30.0), pipe.stage("scored", "trainer")
    a, b = (await trainer.claim(2)).leases
    lose()
    assert (
        await trainer_lease.commit(
            trainer, [EndedGroup(a, Trained()), EndedGroup(b, Dropped("zero_variance"))], release_version=1
        )
        == []
    )


async def publish(pipe, lose, folder):
    await pipe.scored("a")
    trainer_lease, trainer = await TrainerLease.acquire(pipe.connection, 30.0), pipe.stage("scored", "trainer")
    (lease,) = (await trainer.claim(1)).leases
    await trainer_lease.commit(trainer, [EndedGroup(lease, Trained())], release_version=1)
    lose()
    await trainer_lease.publish(1, folder, 1, {})


async def acknowledge(pipe, lose, folder):
    await pipe.scored("a")
    trainer_lease, trainer = await TrainerLease.acquire(pipe.connection, 30.0), pipe.stage("scored", "trainer")
    (lease,) = (await trainer.claim(1)).leases
    await trainer_lease.commit(trainer, [EndedGroup(lease, Trained())], release_version=1)
    lose()
    await trainer_lease.acknowledge([lease.id])


async def pausing(pipe, lose, folder):
    await pipe.feed("a")
    lose()
    with suppress(PenstockError):  # it is paused already, by the first call
        await pause(pipe.connection, "ann")
    with suppress(PenstockError):
        await resume(pipe.connection, "ann")


@asynccontextmanager
async def lossy(redis_url, run, pipe_on, nth):
    """Yield a run's helpers, `lose`, and the proxy, which drops the nth reply after `lose()`."""
    async with Proxy(address_of(redis_url)) as proxy, connect(proxy.url("redis"), run, reconnect_s=5.0) as connection:
        place = [-1]

        def lose() -> None:
            place[0] = proxy.answers + nth

        proxy.plan = lambda number, _: Fault("rst") if number == place[0] else None
        yield pipe_on(connection), lose, proxy


async def state(pipe) -> object:
    """Return the visible state of a run, without times."""
    status = await read_status(pipe.connection)
    stages = {name: (s.depth, s.claimed, s.delayed) for name, s in status.stages.items()}
    return (
        await pipe.prompt_counts(),
        stages,
        status.unfinished,
        status.outstanding,
        status.dead,
        status.counts,
        len(await list_dead_letters(pipe.connection)),
    )


@pytest.mark.parametrize("nth", [0, 1, 2])
@pytest.mark.parametrize("deed", [feed, settle, release, bury, commit, publish, acknowledge, pausing])
async def test_a_script_whose_reply_was_lost_takes_effect_once(pipe, redis_url, pipe_on, tmp_path, deed, nth):
    """`nth` varies, because a script that the server does not know yet takes three requests."""
    await deed(pipe, lambda: None, tmp_path)
    async with lossy(redis_url, f"{pipe.connection.run}-lossy", pipe_on, nth) as (unlucky, lose, proxy):
        await deed(unlucky, lose, tmp_path)
        assert nth or proxy.struck == {"rst": 1}
        assert await state(unlucky) == await state(pipe)


async def test_entries_of_a_lost_claim_reply_are_claimed_again_after_their_lease(pipe, redis_url, pipe_on):
    await pipe.feed("a", "b")
    async with lossy(redis_url, pipe.connection.run, pipe_on, 0) as (unlucky, lose, proxy):
        worker = unlucky.stage("prompts", "unlucky", lease_s=0.3)
        assert (await worker.claim(0)).leases == []
        lose()
        claim = await worker.claim(2)
        assert (claim.leases, proxy.struck) == ([], {"rst": 1})
        await worker.wait(claim)
        assert {lease.prompt_id for lease in (await worker.claim(2)).leases} == {"a", "b"}


async def test_a_version_number_whose_reply_was_lost_is_skipped(pipe, redis_url, pipe_on):
    async with lossy(redis_url, pipe.connection.run, pipe_on, 0) as (unlucky, lose, proxy):
        trainer_lease = await TrainerLease.acquire(unlucky.connection, 30.0)
        given = [await trainer_lease.reserve_version(0)]
        for _ in range(5):
            lose()
            given.append(await trainer_lease.reserve_version(0))
        assert proxy.struck["rst"] == 5
    assert given == sorted(set(given))


@pytest.mark.parametrize("verb", [retry_dead_letters, drop_dead_letters])
async def test_a_dead_letter_whose_reply_was_lost_is_resolved_once(pipe, redis_url, pipe_on, verb):
    await pipe.feed("a")
    worker = pipe.stage("prompts")
    (lease,) = (await worker.claim(1)).leases
    await worker.dead_letter(lease, "data", "no such image")
    (letter,) = await list_dead_letters(pipe.connection)
    async with lossy(redis_url, pipe.connection.run, pipe_on, 2) as (unlucky, lose, _):
        lose()
        with suppress(PenstockError):  # the repeated call may find no such letter, because the first one resolved it
            await verb(unlucky.connection, [letter.id])
    with anyio.fail_after(5):
        counts = await pipe.prompt_counts()
    assert await list_dead_letters(pipe.connection) == []
    assert counts == {"fed": 1, "trained": 0, "dead": 0} | (
        {"dropped": 0, "outstanding": 1} if verb is retry_dead_letters else {"dropped": 1, "outstanding": 0}
    )
