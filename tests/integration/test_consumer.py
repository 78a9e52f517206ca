"""The consumer: which groups it returns, which it ends itself, and in which order it writes."""

import zlib

import anyio
import pytest

from stream.codec import encode
from stream.errors import FencedError, RecordError, RunFailedError
from stream.operator.dead_letters import list_dead_letters
from stream.operator.status import read_status
from stream.records import SCHEMA
from stream.trainer.consume import consume
from stream.trainer.consumer import Consumer
from stream.trainer.leased_group import ResumePoint
from stream.trainer.ledger import Ledger
from stream.trainer.ledger_records import Dropped, Trained, read_contents, read_ledger
from stream.trainer.trainer_lease import TrainerLease


@pytest.fixture
def ledger(tmp_path):
    return tmp_path / "ledger.jsonl"


def names(taken) -> list[str]:
    return [each.group.prompt.id for each in taken]


async def finish_feeding(pipe) -> None:
    await pipe.connection.write_hash("feed", {"done": "1"})


async def wake_repeatedly(pipe) -> None:
    while True:
        await anyio.sleep(0.02)
        await pipe.connection.write_hash("meta", {"x": "y"})


async def ends_in(ledger) -> dict[str, str]:
    return await anyio.to_thread.run_sync(lambda: read_contents(ledger).outcomes)


async def test_groups_are_claimed_committed_checkpointed_and_deleted(pipe, ledger):
    await pipe.scored("c", "a", "b")
    await finish_feeding(pipe)
    saved = []
    async with consume(pipe.connection, ledger) as consumer:
        await consumer.publish("weights", 0, saved.append)
        first = await consumer.claim(2)
        assert names(first) == ["a", "c"]
        await consumer.commit(first, 1, dropped={"a": "difficulty"})
        last = await consumer.claim(2)
        assert names(last) == ["b"]  # fewer than requested: feeding has finished
        await consumer.commit(last, 2)
        await consumer.publish("weights", 2, saved.append, {"loss": 0.5})
        assert (await read_status(pipe.connection)).stages["scored"].marked == 3
        await consumer.checkpoint(saved.append)
        assert await consumer.claim(2) == []
        await consumer.finish("done")
    length = (await anyio.Path(ledger).stat()).st_size
    assert saved == [0, 1, ResumePoint(ledger_bytes=length, ledger_digest=consumer.ledger.digest(), version=1, step=2)]
    status = await read_status(pipe.connection)
    assert (status.stages["scored"].depth, status.outstanding, status.version, status.metrics) == (
        0,
        0,
        1,
        {"loss": 0.5},
    )
    assert (status.meta["finished"], status.dropped) == ("done", {"difficulty": 1})
    assert await ends_in(ledger) == {"a": Dropped("difficulty"), "c": Trained(), "b": Trained()}
    assert await pipe.prompt_counts() == {"fed": 3, "trained": 2, "dropped": 1, "dead": 0, "outstanding": 0}


async def test_a_checkpoint_that_cannot_be_saved_acknowledges_nothing(pipe, ledger):
    def full(_):
        raise OSError("no space left")

    await pipe.scored("a")
    await finish_feeding(pipe)

    async def train() -> None:
        async with consume(pipe.connection, ledger, lease_s=1.0) as consumer:
            await consumer.commit(await consumer.claim(1), 1)
            await consumer.checkpoint(full)

    with pytest.raises(ExceptionGroup) as caught:
        await train()
    assert caught.group_contains(OSError, match="no space left")
    assert (await read_status(pipe.connection)).stages["scored"].marked == 1
    async with consume(pipe.connection, ledger) as again:  # the checkpoint before it was empty
        assert names(await again.claim(1)) == ["a"]


async def test_a_version_that_no_engine_took_is_not_published(pipe, ledger):
    def refused(_version):
        raise OSError("no engine answers")

    async with consume(pipe.connection, ledger) as consumer:
        with pytest.raises(OSError, match="no engine answers"):
            await consumer.publish("weights", 0, refused)
        assert (await read_status(pipe.connection)).version == -1


async def test_groups_in_the_ledger_and_duplicates_are_not_returned(pipe, ledger):
    await pipe.scored("a", "b")
    saved = []
    async with consume(pipe.connection, ledger) as consumer:
        await consumer.commit(await consumer.claim(1), 1)
        await consumer.checkpoint(saved.append)
    for name in ("a", "b", "b"):
        await pipe.connection.redis.xadd(
            pipe.connection.key("scored"), {"prompt": name, "payload": encode(pipe.group(name))}
        )
    await finish_feeding(pipe)
    async with consume(pipe.connection, ledger, saved[0]) as consumer:
        taken = await consumer.claim(5)
        assert names(taken) == ["b"]
        await consumer.commit(taken, 2)
        assert await consumer.claim(5) == []
        await consumer.checkpoint(lambda _: None)
    status = await read_status(pipe.connection)
    assert (status.counts, status.stages["scored"].depth) == ({"fed": 2, "trained": 2, "duplicates": 3}, 0)


async def test_junk_is_dead_lettered_and_a_newer_schema_is_released(pipe, ledger):
    await pipe.scored("a")
    body = encode(pipe.group("newer"))[7:]
    newer = b"PS" + bytes([SCHEMA + 1]) + zlib.crc32(body, SCHEMA + 1).to_bytes(4, "little") + body
    for entry in ({"prompt": "junk", "payload": b"junk"}, {"prompt": "newer", "payload": newer}):
        await pipe.connection.redis.xadd(pipe.connection.key("scored"), entry)
    await finish_feeding(pipe)
    async with consume(pipe.connection, ledger) as consumer:
        assert names(await consumer.claim(5)) == ["a"]
        assert (await read_status(pipe.connection)).stages["scored"].delayed == 1
    assert [letter.prompt_id for letter in await list_dead_letters(pipe.connection)] == ["junk"]


async def test_a_second_consumer_is_refused_and_does_not_touch_the_ledger_of_the_first(pipe, ledger):
    await pipe.scored("a")
    async with consume(pipe.connection, ledger, lease_s=0.5) as consumer:
        await consumer.commit(await consumer.claim(1), 1)
        with pytest.raises(ExceptionGroup) as caught:
            async with consume(pipe.connection, ledger, lease_s=0.5):
                pass
        assert caught.group_contains(FencedError)
        assert await ends_in(ledger) == {"a": Trained()}


async def test_a_fenced_consumer_cannot_end_groups(pipe, ledger):
    await pipe.scored("a")

    async def train() -> None:
        async with consume(pipe.connection, ledger, lease_s=30.0) as consumer:
            taken = await consumer.claim(1)
            await pipe.connection.redis.hdel(pipe.connection.key("policy"), "owner")  # as if its lease had expired
            await TrainerLease.acquire(pipe.connection, 30.0)
            await consumer.commit(taken, 1)

    with pytest.raises(ExceptionGroup) as caught:
        await train()
    assert caught.group_contains(FencedError)
    assert (await pipe.prompt_counts())["outstanding"] == 1


async def test_a_stalled_pipeline_is_an_error(pipe, ledger):
    await pipe.feed("a")

    async def wait_without_result() -> None:
        async with (
            consume(pipe.connection, ledger, stall_timeout_s=0.01) as consumer,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(wake_repeatedly, pipe)
            await consumer.claim(1)

    with pytest.raises(ExceptionGroup) as caught:
        await wait_without_result()
    assert caught.group_contains(RunFailedError, match="1 prompts are unfinished")


async def test_a_stop_request_releases_groups_and_does_not_finish_the_run(pipe, ledger):
    await pipe.scored("a")
    async with consume(pipe.connection, ledger) as consumer, anyio.create_task_group() as tasks:
        taken = []

        async def take() -> None:
            taken.append(await consumer.claim(2))  # there is only one, and feeding continues

        tasks.start_soon(take)
        with anyio.fail_after(10):
            while not (await read_status(pipe.connection)).stages["scored"].claimed:
                await pipe.connection.wait_for_change("$", 0.1)
            pipe.connection.stopping.set()
            await pipe.connection.write_hash("meta", {"x": "y"})  # wakes the consumer
    assert taken == [[]]
    status = await read_status(pipe.connection)
    assert (status.stages["scored"].claimed, status.stages["scored"].delayed) == (0, 1)


async def test_a_record_of_another_prompt_than_its_entry_is_dead_lettered(pipe, ledger):
    """An end counts for the prompt that the entry names: training `a` in its place would lose `b`."""
    await pipe.scored("a", "b")
    await pipe.connection.redis.xadd(pipe.connection.key("scored"), {"prompt": "b", "payload": encode(pipe.group("a"))})
    await finish_feeding(pipe)
    async with consume(pipe.connection, ledger) as consumer:
        taken = await consumer.claim(3)
        assert names(taken) == ["a", "b"]
        await consumer.commit(taken, 1)
    assert [letter.ends_prompt for letter in await list_dead_letters(pipe.connection)] == [False]
    assert await pipe.prompt_counts() == {"fed": 2, "trained": 2, "dropped": 0, "dead": 0, "outstanding": 0}


# --- the buffer, as a trainer that plans its steps uses it


@pytest.fixture
async def make_consumer(pipe, ledger):
    """Open a consumer on this run; `check` decides about each new group."""
    opened = await anyio.to_thread.run_sync(Ledger, ledger)
    trainer_lease = await TrainerLease.acquire(pipe.connection, 30.0)

    def make(check=lambda group, _: group, **options) -> Consumer:
        return Consumer(trainer_lease, pipe.stage("scored", **options), opened, ResumePoint(), check)

    yield make
    await anyio.to_thread.run_sync(opened.close)


async def add_copy(pipe, prompt: str) -> None:
    await pipe.connection.redis.xadd(
        pipe.connection.key("scored"), {"prompt": prompt, "payload": encode(pipe.group(prompt))}
    )


async def test_a_group_that_check_drops_is_recorded_and_not_buffered(make_consumer, pipe):
    await pipe.scored("a", "b")
    seen = []

    def check(group, version):
        seen.append((group.prompt.id, version))
        return Dropped("difficulty") if group.prompt.id == "a" else group.prompt.id

    consumer = make_consumer(check)
    await consumer.poll(2)
    assert (seen, list(consumer.buffer), consumer.buffer["b"].checked) == ([("a", -1), ("b", -1)], ["b"], "b")
    assert consumer.ledger.outcomes == {"a": Dropped("difficulty")}
    assert (await pipe.prompt_counts())["dropped"] == 1
    await consumer.commit(consumer.pop(["b"]), 1)
    lines, _ = await anyio.to_thread.run_sync(read_ledger, consumer.ledger.path)
    written = [each.record for each in lines]
    assert [(line.prompt, line.step, line.in_step) for line in written] == [("a", 1, False), ("b", 1, True)]


@pytest.mark.parametrize("copy", ["like the first", "to be dropped", "unreadable"])
async def test_copies_that_arrive_during_and_after_the_step_of_their_prompt_are_not_checked(make_consumer, pipe, copy):
    await pipe.scored("a")
    checked: list[str] = []

    def check(group, _):
        checked.append(group.prompt.id)
        if len(checked) == 1 or copy == "like the first":
            return group
        if copy == "unreadable":
            raise RecordError("a token outside of the vocabulary")
        return Dropped("difficulty")

    consumer = make_consumer(check)
    await consumer.poll(1)
    in_step = consumer.pop("a")
    await add_copy(pipe, "a")  # by a server that lost its last writes
    await consumer.poll(1)
    assert not consumer.buffer
    await consumer.commit(in_step, 1)
    await add_copy(pipe, "a")
    await consumer.poll(1)
    assert (checked, consumer.buffer) == (["a"], {})
    assert consumer.ledger.outcomes == {"a": Trained()}
    assert (await read_status(pipe.connection)).counts == {"fed": 1, "trained": 1, "duplicates": 2}
    assert await list_dead_letters(pipe.connection) == []


async def test_a_trainer_that_stops_releases_copies_of_what_it_trains(make_consumer, pipe):
    await pipe.scored("a")
    consumer = make_consumer()
    await consumer.poll(1)
    consumer.pop("a")
    await add_copy(pipe, "a")
    await consumer.poll(1)
    await consumer.release_all()
    assert len((await pipe.stage("scored", "other").claim(5)).leases) == 1


async def test_a_newer_copy_replaces_the_buffered_one(make_consumer, pipe):
    await pipe.scored("a")
    consumer = make_consumer()
    await consumer.poll(1)
    first = consumer.buffer["a"].lease.id
    await add_copy(pipe, "a")
    await consumer.poll(1)
    assert consumer.buffer["a"].lease.id != first
    await consumer.commit(consumer.pop("a"), 1)
    assert (await read_status(pipe.connection)).counts == {"fed": 1, "trained": 1, "duplicates": 1}


async def test_a_newer_copy_that_is_dropped_ends_the_prompt(make_consumer, pipe):
    await pipe.scored("a")
    verdicts = iter(["keep", Dropped("difficulty")])
    consumer = make_consumer(lambda *_: next(verdicts))
    await consumer.poll(1)
    await add_copy(pipe, "a")
    await consumer.poll(1)
    assert consumer.buffer == {}
    assert (await read_status(pipe.connection)).counts == {"fed": 1, "dropped:difficulty": 1, "duplicates": 1}


async def test_two_copies_dropped_in_one_poll_are_recorded_once(make_consumer, pipe):
    await pipe.scored("a")
    await add_copy(pipe, "a")
    consumer = make_consumer(lambda *_: Dropped("difficulty"))
    await consumer.poll(2)
    assert (await read_status(pipe.connection)).counts == {"fed": 1, "dropped:difficulty": 1, "duplicates": 1}


@pytest.mark.parametrize("popped", [False, True])
async def test_a_drop_by_the_operator_of_a_prompt_that_a_step_takes_is_undone(make_consumer, pipe, popped):
    await pipe.scored("a")
    consumer = make_consumer()
    await consumer.poll(1)
    # A server that lost its last writes may have the prompt as a dead letter as well.
    await pipe.connection.redis.sadd(pipe.connection.key("dropped_dead"), "a")
    await pipe.connection.redis.hdel(pipe.connection.key("unfinished"), "a")
    await pipe.connection.redis.hincrby(pipe.connection.key("counts"), "dropped:operator", 1)
    fields = {"prompt": "a", "outcome": "dropped:operator"}
    await pipe.connection.redis.xadd(pipe.connection.key("unrecorded_outcomes"), fields)
    groups = consumer.pop("a") if popped else []
    await consumer.sync()
    await consumer.commit(groups or consumer.pop("a"), 1)
    await consumer.sync()
    lines, _ = await anyio.to_thread.run_sync(read_ledger, consumer.ledger.path)
    assert [line.record.outcome for line in lines] == [Trained()]
    assert (await read_status(pipe.connection)).counts == {"fed": 1, "trained": 1, "dropped:operator": 0}
    assert not await pipe.connection.redis.xlen(pipe.connection.key("unrecorded_outcomes"))


async def test_a_lease_that_ran_out_and_was_claimed_again_is_the_same_group(make_consumer, pipe):
    await pipe.scored("a")
    checks = []
    consumer = make_consumer(lambda group, _: checks.append(group), lease_s=0.1)
    for _ in range(2):
        assert len((await consumer.poll(1)).leases) == 1
        await anyio.sleep(0.12)
    assert len(checks) == 1
    await consumer.commit(consumer.pop("a"), 1)
    assert (await read_status(pipe.connection)).counts == {"fed": 1, "trained": 1}
    assert await pipe.prompt_counts() == {"fed": 1, "trained": 1, "dropped": 0, "dead": 0, "outstanding": 0}


async def test_a_group_that_check_cannot_read_is_a_dead_letter_and_an_older_copy_stays(make_consumer, pipe):
    await pipe.scored("a")
    errors = iter([None, RecordError("a token outside of the vocabulary")])

    def check(group, _):
        if error := next(errors):
            raise error
        return group

    consumer = make_consumer(check)
    await consumer.poll(1)
    await add_copy(pipe, "a")
    await consumer.poll(1)
    assert list(consumer.buffer) == ["a"]
    (letter,) = await list_dead_letters(pipe.connection)
    assert "vocabulary" in letter.error


async def test_groups_are_popped_in_the_order_of_their_prompts_and_released_groups_come_again(make_consumer, pipe):
    await pipe.scored("c", "a", "b")
    consumer = make_consumer()
    await consumer.poll(3)
    assert names(consumer.pop(["c", "a"])) == ["a", "c"]
    await consumer.release_all()
    assert consumer.buffer == {}
    await consumer.poll(3)
    assert list(consumer.buffer) == ["b"]


async def test_only_the_next_version_frees_the_capacity_of_committed_groups(make_consumer, pipe):
    await pipe.scored("a")
    await pipe.feed("b")
    consumer, rollout = make_consumer(), pipe.stage("prompts", capacity=1)
    await consumer.announce(0, "weights", 0)
    await consumer.poll(1)
    await consumer.commit(consumer.pop("a"), 1)
    await consumer.announce(0, "weights", 0)  # repeated, as after a server that lost its last writes
    assert (await rollout.claim(1)).leases == []
    await consumer.announce(1, "weights", 1)
    assert len((await rollout.claim(1)).leases) == 1
