"""One stage and its operations: who has a lease, for how long, and how it ends."""

import time

import anyio
import pytest

from stream.errors import LeaseLostError, PenstockError, ServerError
from stream.operator.dead_letters import list_dead_letters
from stream.operator.status import read_status
from stream.queue.stage import RetryPolicy


async def test_a_completed_entry_is_only_in_the_next_stage(pipe):
    await pipe.feed("a")
    worker = pipe.stage("prompts")
    (lease,) = (await worker.claim(10)).leases
    assert (lease.prompt_id, lease.infra_failures, lease.data_failures) == ("a", 0, 0)
    await worker.complete(lease, "groups", pipe.group("a"))
    stages = (await read_status(pipe.connection)).stages
    assert (stages["prompts"].depth, stages["groups"].depth, worker.leases) == (0, 1, {})
    assert not await pipe.connection.redis.exists(
        pipe.connection.key("prompts:leases"), pipe.connection.key("prompts:attempts")
    )


async def test_the_output_has_the_prompt_id_of_its_input(pipe):
    await pipe.feed("a")
    worker = pipe.stage("prompts")
    (lease,) = (await worker.claim(1)).leases
    await worker.complete(lease, "groups", pipe.group("somebody else's"))
    assert (await pipe.stage("groups").claim(1)).leases[0].prompt_id == "a"


async def test_completing_twice_raises_lease_lost(pipe):
    """P21: the same work is delivered twice."""
    await pipe.feed("a")
    worker = pipe.stage("prompts")
    (lease,) = (await worker.claim(1)).leases
    await worker.complete(lease, "groups", pipe.group("a"))
    with pytest.raises(LeaseLostError, match="a in prompts"):
        await worker.complete(lease, "groups", pipe.group("a"))
    assert lease.lost
    assert (await read_status(pipe.connection)).stages["groups"].depth == 1


@pytest.mark.parametrize("verb", ["settle", "release", "bury"])
async def test_a_worker_without_the_lease_cannot_end_the_entry(pipe, verb):
    await pipe.feed("a")
    slow, quick = pipe.stage("prompts", "slow", lease_s=0.05), pipe.stage("prompts", "quick")
    (old,) = (await slow.claim(1)).leases
    await anyio.sleep(0.06)
    (new,) = (await quick.claim(1)).leases
    assert (new.id, new.deaths, new.infra_failures) == (old.id, 1, 0)
    too_late = {
        "settle": lambda: slow.complete(old, "groups", pipe.group("a")),
        "release": lambda: slow.release(old, "infra", "too late"),
        "bury": lambda: slow.dead_letter(old, "unreadable", "too late"),
    }
    with pytest.raises(LeaseLostError):
        await too_late[verb]()
    await quick.complete(new, "groups", pipe.group("a"))
    stages = (await read_status(pipe.connection)).stages
    assert (stages["prompts"].depth, stages["groups"].depth) == (0, 1)


async def test_an_entry_is_not_claimed_before_its_lease_expires(pipe):
    await pipe.feed("a")
    await pipe.stage("prompts", "dead", lease_s=0.3).claim(1)
    other = pipe.stage("prompts", "other")
    claim = await other.claim(1)
    assert claim.leases == []
    assert claim.next_due_s == pytest.approx(0.3, abs=0.1)
    await other.wait(claim)
    assert len((await other.claim(1)).leases) == 1


async def test_renewal_keeps_a_long_job(pipe):
    await pipe.feed("a")
    worker, other = pipe.stage("prompts", "long", lease_s=0.3), pipe.stage("prompts", "other")
    (lease,) = (await worker.claim(1)).leases
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker.renew_leases)
        for _ in range(10):
            await anyio.sleep(0.08)
            assert (await other.claim(1)).leases == []
        tasks.cancel_scope.cancel()
    await worker.complete(lease, "groups", pipe.group("a"))


async def test_renewal_finds_lost_leases_and_cancels_their_work(pipe):
    await pipe.feed("a", "b")
    worker = pipe.stage("prompts", "stalled", lease_s=0.15)
    lost, kept = (await worker.claim(2)).leases
    await anyio.sleep(0.16)
    await pipe.stage("prompts", "other").claim(1)
    with anyio.move_on_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.renew_leases)
            with kept.cancel_on_loss() as kept_scope, lost.cancel_on_loss() as lost_scope:
                await anyio.sleep_forever()
            tasks.cancel_scope.cancel()
    assert (lost.lost, kept.lost) == (True, False)
    assert (lost_scope.cancel_called, kept_scope.cancel_called) == (True, False)
    assert list(worker.leases) == [kept.id]


async def test_renewal_does_not_cancel_work_whose_lease_is_ending(pipe):
    await pipe.feed("a")
    worker = pipe.stage("prompts", lease_s=0.06)
    (lease,) = (await worker.claim(1)).leases
    with lease.cancel_on_loss() as scope, worker.ending([lease]):
        # The script has run, and its reply has not arrived yet.
        await pipe.connection.run_script("complete", "prompts", "w", lease.id, "groups", "a", b"")
        with anyio.move_on_after(0.1):
            await worker.renew_leases()
    assert not scope.cancel_called


async def test_reclaiming_an_own_entry_cancels_the_older_work(pipe):
    await pipe.feed("a")
    worker = pipe.stage("prompts", lease_s=0.05)
    (old,) = (await worker.claim(1)).leases
    await anyio.sleep(0.06)
    with old.cancel_on_loss() as scope:
        (new,) = (await worker.claim(1)).leases
    assert old.lost
    assert scope.cancel_called
    assert worker.leases == {new.id: new}


async def test_a_released_entry_waits_for_its_delay(pipe):
    await pipe.feed("a")
    worker, other = pipe.stage("prompts", backoff_s=0.4), pipe.stage("prompts", "other")
    (lease,) = (await worker.claim(1)).leases
    released = time.monotonic()
    assert not await worker.release(lease, "infra", "no tool server")
    claim = await other.claim(1)
    assert claim.leases == []
    assert 0.1 < claim.next_due_s <= 0.4
    while not claim.leases:
        await other.wait(claim)
        claim = await other.claim(1)
    assert 0.2 <= time.monotonic() - released < 0.6
    assert claim.leases[0].infra_failures == 1


def test_delays_double_up_to_a_limit():
    terms = RetryPolicy(backoff_s=1.0)
    assert all(0.5 * 2**n <= terms.delay_s(n) <= 2**n for n in range(6))
    assert 30 <= terms.delay_s(100_000) <= 60


@pytest.mark.parametrize("kind", ["infra", "data"])
async def test_an_entry_at_its_failure_limit_is_dead_lettered(pipe, kind):
    await pipe.feed("a")
    worker = pipe.stage("prompts", infra_attempts=3, data_attempts=3)
    for failures in (1, 2, 3):
        await anyio.sleep(0.05)
        (lease,) = (await worker.claim(1)).leases
        assert await worker.release(lease, kind, f"failure {failures}") == (failures == 3)
    (letter,) = await list_dead_letters(pipe.connection)
    assert (letter.stage, letter.prompt_id, letter.reason, letter.error) == ("prompts", "a", kind, "failure 3")
    assert (letter.infra_failures, letter.data_failures) == ((3, 0) if kind == "infra" else (0, 3))
    assert (letter.payload, letter.ends_prompt) == (lease.payload, True)
    assert (await pipe.prompt_counts())["dead"] == 1


async def test_failure_limits_are_separate(pipe):
    await pipe.feed("a")
    worker = pipe.stage("prompts", infra_attempts=2, data_attempts=2)
    for kind in ("infra", "data"):
        await anyio.sleep(0.02)
        (lease,) = (await worker.claim(1)).leases
        assert not await worker.release(lease, kind, "once")
    assert await list_dead_letters(pipe.connection) == []


async def test_releases_without_a_failure_count_towards_no_limit(pipe):
    await pipe.feed("a")
    worker = pipe.stage("prompts", infra_attempts=1, data_attempts=1)
    for _ in range(5):
        (lease,) = (await worker.claim(1)).leases
        assert not await worker.release(lease, "none", "")
    assert (lease.infra_failures, lease.data_failures) == (0, 0)


async def test_an_entry_whose_lease_expires_too_often_is_dead_lettered(pipe):
    await pipe.feed("a", "b")
    killed = pipe.stage("prompts", "killed", lease_s=0.03, infra_attempts=2)
    for deaths in range(4):
        (lease,) = (await killed.claim(1)).leases
        assert (lease.prompt_id, lease.deaths) == ("a", deaths)
        if lease.is_suspect:
            await killed.begin_alone(lease, "environment world")
        await anyio.sleep(0.05)
    claim = await pipe.stage("prompts", "next", infra_attempts=2).claim(1)
    assert [lease.prompt_id for lease in claim.leases] == ["b"]
    (letter,) = await list_dead_letters(pipe.connection)
    assert (letter.prompt_id, letter.reason, letter.infra_failures) == ("a", "infra", 2)


@pytest.mark.parametrize("fields", [1, 6000])
async def test_a_foreign_entry_is_one_dead_letter_and_the_stream_continues(pipe, fields):
    await pipe.connection.redis.xadd(pipe.connection.key("prompts"), {f"field{i}": "?" for i in range(fields)})
    await pipe.feed("a")
    worker = pipe.stage("prompts")
    foreign, good = (await worker.claim(10)).leases
    assert (foreign.payload, foreign.prompt_id) == (b"", "")
    await worker.dead_letter(foreign, "unreadable", "0 bytes are no record")
    await worker.complete(good, "groups", pipe.group("a"))
    (letter,) = await list_dead_letters(pipe.connection)
    assert (letter.reason, letter.ends_prompt, letter.payload) == ("unreadable", False, b"")
    assert (await read_status(pipe.connection)).counts == {"fed": 1, "extra_dead_letters": 1}
    assert (await pipe.prompt_counts())["outstanding"] == 1


async def test_deleted_entries_are_skipped(pipe):
    await pipe.feed("a", "b", "c")
    worker = pipe.stage("prompts", lease_s=0.05)
    first, second = (await worker.claim(2)).leases
    await worker.release(second, "none", "")
    await pipe.connection.redis.xdel(pipe.connection.key("prompts"), first.id, second.id)
    await anyio.sleep(0.06)
    claims = [await worker.claim(1) for _ in range(3)]
    assert [lease.prompt_id for claim in claims for lease in claim.leases] == ["c"]
    assert await pipe.connection.redis.zcard(pipe.connection.key("prompts:retries")) == 0


async def test_a_thousand_entries_in_one_call(pipe):
    await pipe.feed(*(f"p{i}" for i in range(1000)))
    worker = pipe.stage("prompts", lease_s=0.2)
    leases = (await worker.claim(1000)).leases
    assert len(leases) == 1000
    await pipe.connection.run_script("renew_leases", "prompts", "w", 100, *worker.leases)
    await anyio.sleep(0.12)
    again = (await pipe.stage("prompts", "other").claim(1000)).leases
    assert {lease.id for lease in again} == {lease.id for lease in leases}


@pytest.mark.parametrize("what", ["feed", "settle", "release"])
async def test_a_blocked_worker_is_woken(pipe, what):
    await pipe.feed("a")
    worker, waiter = pipe.stage("prompts"), pipe.stage("groups" if what == "settle" else "prompts", "waiter")
    (lease,) = (await worker.claim(1)).leases
    woken_after = []

    async def wait():
        claim = await waiter.claim(1)
        assert claim.leases == []
        ready.set()
        await waiter.wait(claim)
        woken_after.append(time.monotonic() - began)
        assert len((await waiter.claim(1)).leases) == 1

    ready = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await ready.wait()
        await anyio.sleep(0.1)
        began = time.monotonic()
        match what:
            case "feed":
                await pipe.feed("b")
            case "settle":
                await worker.complete(lease, "groups", pipe.group("a"))
            case "release":
                await worker.release(lease, "none", "")
    assert woken_after[0] < 0.1


@pytest.mark.parametrize("situation", ["nothing there", "no place for what waits"])
async def test_an_idle_worker_makes_few_calls(pipe, situation):
    worker = pipe.stage("prompts", capacity=1)
    if situation == "no place for what waits":
        await pipe.feed("a", "b")
        released, _ = (await pipe.stage("prompts", "other").claim(2)).leases
        await pipe.stage("prompts", "other").release(released, "none", "")
    before = await calls(pipe)
    with anyio.move_on_after(2):
        while True:
            claim = await worker.claim(1)
            assert claim.leases == []
            await worker.wait(claim)
    assert await calls(pipe) - before <= 4


async def calls(pipe) -> int:
    """Return the number of scripts and blocking reads that this server has run."""
    stats = await pipe.connection.redis.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "xread"))


@pytest.mark.parametrize("name", ["released", "marked"])
async def test_reserved_consumer_names_are_refused(pipe, name):
    with pytest.raises(PenstockError, match=name):
        pipe.stage("prompts", name)


async def test_released_and_marked_entries_have_no_lease_to_expire(pipe):
    await pipe.scored("a")
    trainer = pipe.stage("scored", "trainer", lease_s=0.02)
    (lease,) = (await trainer.claim(1)).leases
    await trainer.release(lease, "none", "")
    await anyio.sleep(0.03)
    (lease,) = (await pipe.stage("scored", "other").claim(1)).leases
    assert lease.infra_failures == 0


async def test_an_emptied_server_is_recognised(pipe):
    await pipe.feed("a")
    worker = pipe.stage("prompts")
    (lease,) = (await worker.claim(1)).leases
    await pipe.connection.redis.delete(*await pipe.connection.redis.keys(f"{{{pipe.connection.run}}}*"))
    for call in (worker.claim(1), worker.complete(lease, "groups", pipe.group("a"))):
        with pytest.raises(ServerError, match="does not know run"):
            await call


async def test_an_old_wake_entry_does_not_block_a_worker(pipe):
    worker = pipe.stage("prompts")
    before = await worker.claim(1)
    await pipe.feed("a")
    with anyio.fail_after(0.5):
        await worker.wait(before)
