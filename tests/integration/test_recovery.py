"""A trainer that resumes on a server, or with a checkpoint, that lacks what the other has."""

import anyio
import msgspec
import pytest

from stream import private_server as server_data
from stream.connection.run_connection import connect
from stream.errors import RunMismatchError
from stream.operator.control import release_worker
from stream.operator.dead_letters import drop_dead_letters, list_dead_letters
from stream.operator.status import read_status
from stream.private_server import private_server
from stream.queue.feed import Feed
from stream.records import Prompt
from stream.trainer.consume import consume, write_unrecorded_outcomes
from stream.trainer.ledger import Ledger
from stream.trainer.ledger_records import (
    AlreadyEnded,
    Dropped,
    LedgerEvent,
    LedgerRecord,
    Retried,
    Trained,
    read_contents,
    read_events,
    read_ledger,
)
from stream.trainer.trainer_lease import EndedGroup, TrainerLease

aside = anyio.to_thread.run_sync


async def new_ledger(path, *prompts: str) -> Ledger:
    def make() -> Ledger:
        ledger = Ledger(path)
        ledger.append([LedgerRecord(prompt, Trained(), 1, 0, "") for prompt in prompts])
        ledger.sync()
        return ledger

    return await aside(make)


async def test_a_trained_prompt_that_is_fed_again_after_recovery_is_counted_once(pipe, tmp_path):
    """The server lost the feeding of b, which the ledger has; the feeder feeds it after the trainer has recovered."""
    ledger = await new_ledger(tmp_path / "ledger.jsonl", "a", "b")
    await pipe.scored("a")
    lease = await TrainerLease.acquire(pipe.connection, 30.0)
    await lease.recover(ledger)
    assert await pipe.prompt_counts() == {"fed": 1, "trained": 1, "dropped": 0, "dead": 0, "outstanding": 0}
    await pipe.scored("b")
    trainer = pipe.stage("scored", "t")
    again = (await trainer.claim(5)).leases
    await lease.commit(trainer, [EndedGroup(each, AlreadyEnded(Trained())) for each in again], release_version=1)
    assert await pipe.prompt_counts() == {"fed": 2, "trained": 2, "dropped": 0, "dead": 0, "outstanding": 0}
    await lease.recover(ledger)
    ledger.close()


async def test_counts_that_are_wrong_are_derived_from_the_ledger_and_refuse_nothing(pipe, tmp_path):
    ledger = await new_ledger(tmp_path / "ledger.jsonl", "a", "b")
    await pipe.scored("a", "b", "c")
    lease, trainer = await TrainerLease.acquire(pipe.connection, 30.0), pipe.stage("scored", "t")
    ended = [EndedGroup(each, Trained()) for each in (await trainer.claim(2)).leases]
    await lease.commit(trainer, ended, release_version=1)
    await lease.acknowledge([each.lease.id for each in ended], ledger.length)
    await pipe.connection.redis.hincrby(pipe.connection.key("counts"), "trained", 8)
    await lease.recover(ledger)
    assert await pipe.prompt_counts() == {"fed": 3, "trained": 2, "dropped": 0, "dead": 0, "outstanding": 1}
    ledger.close()


async def test_a_recovery_that_the_server_lost_is_repeated(pipe, tmp_path):
    await pipe.scored("a", "b")
    before = pipe.stage("scored", "before")
    old = await TrainerLease.acquire(pipe.connection, 30.0)
    empty = await new_ledger(tmp_path / "none.jsonl")
    await old.recover(empty)
    empty.close()
    (lease, _) = (await before.claim(2)).leases
    await old.commit(before, [EndedGroup(lease, Trained())], release_version=1)
    await old.release()
    key = pipe.connection.key
    lost = {name: await pipe.connection.redis.dump(key(name)) for name in ("scored", "scored:marked", "scored:counted",
            "counts", "unfinished", "policy", "scored:leases")}  # fmt: skip
    await Feed(pipe.connection, 10).finish()
    async with consume(pipe.connection, tmp_path / "ledger.jsonl") as consumer:
        assert consumer.requeued_groups == 1
        await pipe.connection.redis.delete(key("scored:retries"))
        for name, value in lost.items():
            await pipe.connection.redis.delete(key(name))
            if value:
                await pipe.connection.redis.restore(key(name), 0, value)
        await consumer.trainer_lease.renew()
        with anyio.fail_after(5):
            assert {each.group.prompt.id for each in await consumer.claim(2)} == {"a", "b"}
        assert not consumer.trainer_lease.lost_recovery, "every poll would recover again"


async def end_groups(pipe, path, count: int) -> list:
    """Train, checkpoint and acknowledge groups one by one; return the resume points."""
    points = []
    async with consume(pipe.connection, path) as consumer:
        for step in range(1, count + 1):
            await consumer.commit(await consumer.claim(1), step)
            await consumer.checkpoint(points.append)
    return points


async def test_an_older_checkpoint_has_what_lies_behind_it_fed_again_and_the_newer_one_may_come_back(pipe, tmp_path):
    path = tmp_path / "ledger.jsonl"
    await pipe.scored("a", "b", "c")
    older, newer = await end_groups(pipe, path, 2)
    whole = await aside(path.read_bytes)
    async with consume(pipe.connection, path, msgspec.structs.replace(older, is_newest=False)):
        status = await read_status(pipe.connection)
        assert (status.feed.get("cursor"), status.prompt_counts["fed"]) == (None, 0)
        ended = (await aside(read_contents, path, int(status.policy["ledger"]))).ends()
        assert ended == {"a": "trained"}
        rows = [Prompt(id=name, messages=[]) for name in "abc"]
        assert await Feed(pipe.connection, 10).put(rows, "", "3", ended=ended) == 2
        assert await pipe.prompt_counts() == {"fed": 3, "trained": 1, "dropped": 0, "dead": 0, "outstanding": 2}
        assert len(await aside(path.read_bytes)) == older.ledger_bytes
    async with consume(pipe.connection, path, newer):
        assert await aside(path.read_bytes) == whole
        assert await pipe.prompt_counts() == {"fed": 3, "trained": 2, "dropped": 0, "dead": 0, "outstanding": 1}


async def test_a_restored_folder_that_is_older_than_what_the_server_deleted_has_the_rest_fed_again(pipe, tmp_path):
    path = tmp_path / "ledger.jsonl"
    await pipe.scored("a", "b", "c")
    older, _ = await end_groups(pipe, path, 2)
    await aside(lambda: path.write_bytes(path.read_bytes()[: older.ledger_bytes]))  # the copy of the first checkpoint
    refused = pytest.RaisesExc(RunMismatchError, match="Restore the run's folder")
    with pytest.RaisesGroup(refused, flatten_subgroups=True):
        async with consume(pipe.connection, path, older):
            pass
    async with consume(pipe.connection, path, msgspec.structs.replace(older, is_restored=True)):
        ended = (await aside(read_contents, path, older.ledger_bytes)).ends()
        rows = [Prompt(id=name, messages=[]) for name in "abc"]
        assert await Feed(pipe.connection, 10).put(rows, "", "3", ended=ended) == 2
        assert await pipe.prompt_counts() == {"fed": 3, "trained": 1, "dropped": 0, "dead": 0, "outstanding": 2}


@pytest.mark.parametrize("harm", ["another run's", "removed", "shorter", "altered"])
async def test_a_ledger_that_does_not_fit_is_refused_and_left_as_it_is(pipe, tmp_path, harm):
    path = tmp_path / "ledger.jsonl"
    await pipe.scored("a", "b", "c")
    _, newer = await end_groups(pipe, path, 2)
    content = await aside(path.read_bytes)
    harmed = {
        "another run's": content.replace(b'"a"', b'"x"'),
        "removed": b"",
        "shorter": content[:-9],
        "altered": content.replace(b'"prompt":"b"', b'"prompt":"c"'),
    }[harm]
    await aside(path.write_bytes, harmed)
    refused = pytest.RaisesExc(RunMismatchError, match=str(path))
    with pytest.RaisesGroup(refused, flatten_subgroups=True):
        async with consume(pipe.connection, path, newer):
            pass
    assert await aside(path.read_bytes) == harmed


async def test_dead_letters_and_operators_drops_outlive_the_server(pipe, tmp_path):
    path, worker = tmp_path / "ledger.jsonl", pipe.stage("prompts")
    await pipe.scored("a")
    await pipe.feed("dead", "dropped", "retried", "dropped late")
    for lease in (await worker.claim(4)).leases:
        await worker.dead_letter(lease, "unreadable", "altered")
    letters = {letter.prompt_id: letter.id for letter in await list_dead_letters(pipe.connection)}
    await drop_dead_letters(pipe.connection, [letters["dropped"]])
    (point,) = await end_groups(pipe, path, 1)
    ends = (await aside(read_contents, path)).ends()
    assert ends.pop("a") == "trained"
    assert ends == {"dead": "dead:unreadable", "retried": "dead:unreadable", "dropped late": "dead:unreadable",
                    "dropped": "dropped:operator"}  # fmt: skip
    assert not await pipe.connection.redis.xlen(pipe.connection.key("unrecorded_outcomes"))
    # No trainer is running: the command records it.
    await drop_dead_letters(pipe.connection, [letters["dropped late"]])
    await write_unrecorded_outcomes(pipe.connection, path)
    keys = [key async for key in pipe.connection.redis.scan_iter(f"{{{pipe.connection.run}}}*")]
    await pipe.connection.redis.delete(*keys)
    for stage in ("prompts", "groups", "scored"):
        await pipe.connection.create_stream(stage)
    async with consume(pipe.connection, path, point):
        policy = await pipe.connection.read_hash("policy")
        ended = (await aside(read_contents, path, int(policy["ledger"]))).ends()
        rows = [Prompt(id=name, messages=[]) for name in ("a", *letters, "new")]
        assert await Feed(pipe.connection, 10).put(rows, "", "6", ended=ended) == 1
        assert await pipe.prompt_counts() == {"fed": 6, "trained": 1, "dropped": 2, "dead": 2, "outstanding": 1}
    (first, *_) = await list_dead_letters(pipe.connection)
    assert (first.prompt_id, first.stage, first.ends_prompt, bool(first.payload)) == ("dead", "prompts", True, True)


def test_ends_without_a_trainer_and_events_stay_when_the_ledger_is_cut(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.append([LedgerRecord("a", Trained(), 1, 0, "")])
    length = ledger.sync()
    ledger.append([LedgerRecord("b", Trained(), 2, 1, "")])
    assert ledger.append_end("c", Dropped("operator"), 2, 1)
    assert not ledger.append_end("b", Dropped("operator"), 2, 1)
    assert not ledger.append_end("d", Retried(), 2, 1)
    ledger.append_event(LedgerEvent("setting_changed", 2, {"name": "rewards"}))
    ledger.close()
    resumed = Ledger(path, length)
    assert resumed.outcomes == {"a": Trained(), "c": Dropped("operator")}
    assert resumed.sync() == resumed.resumed_bytes == path.stat().st_size
    resumed.close()
    assert [event.event for event in read_events(path)] == ["setting_changed"]
    assert [line.record.prompt for line in read_ledger(path)[0]] == ["a", "c"]


async def test_a_lease_from_before_the_clock_stepped_back_expires_within_its_length(pipe):
    await pipe.feed("a", "b")
    worker = pipe.stage("prompts", "dead", lease_s=0.2)
    first, second = (await worker.claim(2)).leases
    await worker.release(second, "infra", "no engine")
    two_hours = 7_200_000
    for name in ("leases", "retries"):
        key = pipe.connection.key(f"prompts:{name}")
        for entry, score in await pipe.connection.redis.zrange(key, 0, -1, withscores=True):
            await pipe.connection.redis.zadd(key, {entry: score + two_hours})
    other = pipe.stage("prompts", "other", lease_s=0.2)
    got = (await other.claim(5)).leases
    await anyio.sleep(0.25)
    got += (await other.claim(5)).leases
    assert {lease.id for lease in got} == {first.id, second.id}


async def test_a_trainers_lease_from_before_the_clock_stepped_back_expires(pipe):
    await TrainerLease.acquire(pipe.connection, 0.2)
    await pipe.connection.redis.hincrby(pipe.connection.key("policy"), "owner_until", 7_200_000)
    with anyio.fail_after(2):
        await TrainerLease.acquire(pipe.connection, 0.2)


async def test_what_a_killed_worker_held_is_charged_from_the_third_death_on_when_it_ran_alone(pipe):
    await pipe.feed("a", "b")
    killed = pipe.stage("prompts", "rollout-host-77-abc", infra_attempts=2)
    await killed.claim(1)
    alive = pipe.stage("prompts", "rollout-host-7-abc")
    held = (await alive.claim(1)).leases
    found = []
    for _ in range(4):
        (entry,) = await release_worker(pipe.connection, "host", 77, 2, "was killed")
        found.append((entry.prompt_id, entry.deaths, entry.is_charged, entry.is_dead))
        for lease in (await killed.claim(1)).leases:
            if lease.is_suspect:
                await killed.begin_alone(lease, "")
    assert found == [("a", 1, False, False), ("a", 2, False, False), ("a", 3, True, False), ("a", 4, True, True)]
    (letter,) = await list_dead_letters(pipe.connection)
    assert (letter.prompt_id, letter.infra_failures) == ("a", 2)
    assert (await alive.release(held[0], "none", "")) is False


@pytest.mark.parametrize("harm", ["zeros", "zeros after a torn command", "an altered byte", "a removed file", "junk"])
async def test_damaged_data_of_a_private_server_are_repaired_or_set_aside(tmp_path, run_name, pipe_on, harm):
    data, intact = tmp_path / "redis", harm.startswith("zeros")
    async with private_server(data, fsync="always") as url, connect(url, run_name) as connection:
        await pipe_on(connection).feed("a", "b")

    def damage() -> None:
        (file,) = data.rglob("*.incr.aof")
        content = file.read_bytes()
        if intact:  # as after a power failure, there are no digests
            (data / server_data.DIGESTS).unlink()
            torn = b"*3\r\n$3\r\nSET\r\n$1" if "torn" in harm else b""
            file.write_bytes(content + torn + bytes(5000))
        elif harm == "an altered byte":
            file.write_bytes(content.replace(b"prompts", b"prompzs", 1))
        elif harm == "junk":
            (data / server_data.DIGESTS).unlink()
            file.write_bytes(b"junk" + content)
        else:
            file.unlink()

    await aside(damage)
    async with private_server(data, fsync="always") as url, connect(url, run_name) as connection:
        assert await connection.redis.xlen(connection.key("prompts")) == (2 if intact else 0)
    found = await aside(lambda: list(data.glob("damaged-*")))
    assert bool(found) is not intact
