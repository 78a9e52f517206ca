"""A damaged ledger is rebuilt from the archive and the server: what the weights contain is neither lost nor doubled."""

from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
import structlog
from msgspec.structs import replace

from stream.connection.run_connection import connect
from stream.errors import RunMismatchError
from stream.queue.stage import RetryPolicy, Stage
from stream.trainer.archive import Archive
from stream.trainer.consume import open_consumer, open_trainer_lease
from stream.trainer.leased_group import ResumePoint
from stream.trainer.ledger_records import Dead, Dropped, Trained, read_contents, read_ledger


class Run:
    """A run with an archive, whose trainers resume from the checkpoints that it keeps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger = folder / "ledger.jsonl"
        self.checkpoints = [ResumePoint()]

    @asynccontextmanager
    async def trainer(self, connection, resume=None):
        """Open a trainer at the newest checkpoint, or at `resume`. Groups whose name begins with `d` are dropped."""
        resume = self.checkpoints[-1] if resume is None else resume
        async with open_trainer_lease(connection, self.folder, 2.0) as (lease, lock):
            archive = await anyio.to_thread.run_sync(Archive, self.folder / "groups", None, lock)
            stage = Stage(connection, "scored", f"trainer-{lease.token}", RetryPolicy(lease_s=2.0))

            def check(group, _):
                return Dropped("dull") if group.prompt.id.startswith("d") else group

            try:
                async with open_consumer(lease, lock, stage, self.ledger, resume, check, archive=archive) as consumer:
                    await consumer.publish("weights", consumer.step, lambda _: None)
                    yield consumer
            finally:
                archive.close()

    async def train(self, consumer, *prompts, checkpoint=True):
        """Train one step on these groups, which are all that there are."""
        while set(prompts) - consumer.buffer.keys():
            await consumer.poll(100)
        await consumer.commit(consumer.pop(prompts), consumer.step + 1)
        await consumer.publish("weights", consumer.step, lambda _: None)
        if checkpoint:
            await consumer.checkpoint(self.checkpoints.append)
            before = self.checkpoints[-2]
            trained = list((await self.outcomes()).values()).count(Trained())
            resumed = (*before.resumed, (before.step, before.version)) if before.step else ()
            self.checkpoints[-1] = replace(self.checkpoints[-1], groups=trained, resumed=resumed)

    async def outcomes(self):
        return await anyio.to_thread.run_sync(lambda: read_contents(self.ledger).outcomes)

    async def content(self):
        return await anyio.Path(self.ledger).read_bytes()

    async def damage(self, harm: str) -> None:
        path, content = anyio.Path(self.ledger), await self.content()
        middle = content.index(b"\n", len(content) // 2) + 5
        match harm:
            case "zeroed tail":
                await path.write_bytes(content[:middle] + bytes(len(content) - middle))
            case "all zeros":
                await path.write_bytes(bytes(len(content)))
            case "truncated":
                await path.write_bytes(content[:middle])
            case "missing":
                await path.unlink()
            case "a flipped bit":
                await path.write_bytes(content.replace(b'"trained"', b'"trainedb', 1))
            case "a flipped digit":
                await path.write_bytes(content.replace(b'"step":2', b'"step":3', 1))
            case "another name":
                await path.write_bytes(content.replace(b'"prompt":"a"', b'"prompt":"x"', 1))


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


async def empty(connection):
    """Remove all keys of the run, as a private server that cannot load its data starts."""
    keys = [key async for key in connection.redis.scan_iter(match=connection.key("*"))]
    await connection.redis.delete(*keys)


HARMS = ["zeroed tail", "all zeros", "truncated", "missing", "a flipped bit", "a flipped digit", "another name"]


@pytest.mark.parametrize("harm", HARMS)
async def test_a_damaged_ledger_is_rebuilt_and_no_group_comes_again(pipe, run, harm):
    await pipe.scored("a", "b", "dull", "c", "e", "f")
    async with run.trainer(pipe.connection) as consumer:
        await run.train(consumer, "a", "b")
        await run.train(consumer, "c", "e")
    before = await run.outcomes()
    await run.damage(harm)
    with structlog.testing.capture_logs() as logs:
        async with run.trainer(pipe.connection) as consumer:
            assert await run.outcomes() == before
            assert "was rebuilt" in consumer.ledger.rebuilt_text
            assert sorted(consumer.buffer) == []
            await consumer.poll(100)
            assert sorted(consumer.buffer) == ["f"]
            await run.train(consumer, "f")
    assert [log["event"] for log in logs if log["event"].startswith("ledger")] == ["ledger.rebuilt"]
    assert await pipe.prompt_counts() == {"fed": 6, "trained": 5, "dropped": 1, "dead": 0, "outstanding": 0}
    _, invalid = await anyio.to_thread.run_sync(read_ledger, run.ledger)
    assert invalid == []


async def test_where_only_groups_are_missing_the_very_bytes_come_back(pipe, run):
    await pipe.scored("a", "b", "c", "e")
    async with run.trainer(pipe.connection) as consumer:
        await run.train(consumer, "a", "b")
        await run.train(consumer, "c", "e")
    before = await run.content()
    await run.damage("zeroed tail")
    async with run.trainer(pipe.connection):
        assert await run.content() == before
    assert len(list(run.folder.glob("ledger.jsonl.damaged-*"))) == 1


@pytest.mark.parametrize("harm", ["zeroed tail", "missing"])
async def test_with_an_emptied_server_no_trained_prompt_is_trained_again(pipe, run, harm, redis_url, run_name, pipe_on):
    await pipe.scored("a", "b", "c", "e")
    async with run.trainer(pipe.connection) as consumer:
        await run.train(consumer, "a", "b")
        await run.train(consumer, "c")
    await run.damage(harm)
    await empty(pipe.connection)
    async with connect(redis_url, run_name) as connection, run.trainer(connection) as consumer:
        again = pipe_on(connection)
        await again.scored("a", "b", "c", "e")  # a feeder begins anew
        await consumer.poll(100)
        assert sorted(consumer.buffer) == ["e"]
        await run.train(consumer, "e")
        assert (await again.prompt_counts())["trained"] == 4
    assert set(await run.outcomes()) == {"a", "b", "c", "e"}


async def test_ends_without_a_group_come_from_the_server(pipe, run):
    await pipe.scored("a", "b", "c")
    await pipe.feed("x", "y")
    worker = pipe.stage("prompts", "rollout-1")
    for lease in (await worker.claim(2)).leases:
        await worker.dead_letter(lease, "unreadable", "no")
    async with run.trainer(pipe.connection) as consumer:
        await run.train(consumer, "a", "b")
        await run.train(consumer, "c")
    assert (await anyio.to_thread.run_sync(read_contents, run.ledger)).dead.keys() == {"x", "y"}
    await run.damage("all zeros")
    async with run.trainer(pipe.connection) as consumer:
        assert consumer.ledger.dead == {"x": Dead("unreadable"), "y": Dead("unreadable")}
        assert consumer.ledger.rebuilt_text.endswith("3 groups from the archive, 2 ends from the server")
    assert (await pipe.prompt_counts())["dead"] == 2


async def test_a_rebuilt_ledger_is_accepted_until_the_next_checkpoint_and_rebuilt_again_if_damaged(pipe, run):
    await pipe.scored("a", "b", "dull", "c", "e")
    async with run.trainer(pipe.connection) as consumer:
        await run.train(consumer, "a", "b")
        await run.train(consumer, "c")
    before = await run.outcomes()
    for _ in range(2):
        await run.damage("all zeros")
        for expected in (True, False):  # a trainer that is killed before its first checkpoint leaves the old one
            async with run.trainer(pipe.connection) as consumer:
                assert bool(consumer.ledger.rebuilt_text) is expected
                assert consumer.ledger.outcomes == before
                await consumer.poll(100)
                assert sorted(consumer.buffer) == ["e"]
                await consumer.release_all()
    async with run.trainer(pipe.connection) as consumer:
        await run.train(consumer, "e")
    async with run.trainer(pipe.connection) as consumer:
        assert consumer.ledger.outcomes == before | {"e": Trained()}


async def test_a_step_that_was_lost_with_its_trainer_is_not_taken_for_one_that_the_weights_contain(pipe, run):
    await pipe.scored("a", "b", "c", "e")
    async with run.trainer(pipe.connection) as consumer:
        await run.train(consumer, "a")
        await run.train(consumer, "b", checkpoint=False)
        await run.train(consumer, "c", checkpoint=False)
    async with run.trainer(pipe.connection) as consumer:
        await run.train(consumer, "e")
    await run.damage("all zeros")
    async with run.trainer(pipe.connection) as consumer:
        assert consumer.ledger.outcomes == {"a": Trained(), "e": Trained()}
        await consumer.poll(100)
        assert sorted(consumer.buffer) == ["b", "c"]


async def test_an_older_checkpoint_with_a_zeroed_tail_trains_the_rest_again(pipe, run):
    await pipe.scored("a", "b", "c")
    async with run.trainer(pipe.connection) as consumer:
        await run.train(consumer, "a")
        await run.train(consumer, "b")
    older, content = run.checkpoints[1], await run.content()
    await anyio.Path(run.ledger).write_bytes(content[: older.ledger_bytes] + bytes(len(content) - older.ledger_bytes))
    resume = replace(older, is_newest=False)
    async with run.trainer(pipe.connection, resume) as consumer:
        assert consumer.ledger.outcomes == {"a": Trained()}
        assert (await pipe.connection.read_hash("feed")).get("cursor") is None, "the feeder begins anew"


async def test_without_all_groups_nothing_is_rebuilt_and_nothing_is_changed(pipe, run):
    await pipe.scored("a", "b", "c")
    async with run.trainer(pipe.connection) as consumer:
        await run.train(consumer, "a", "b")
    async with run.trainer(pipe.connection) as consumer:
        await run.train(consumer, "c")
    await anyio.Path(run.folder / "groups" / "000001.groups").unlink()
    await run.damage("all zeros")
    before = await run.content()
    refused = pytest.RaisesExc(
        RunMismatchError,
        match=r"contain 3 groups, of which ledger and archive know 1 \(none of step 1\); the others would be",
    )
    with pytest.RaisesGroup(refused, flatten_subgroups=True):
        async with run.trainer(pipe.connection):
            pass
    assert await run.content() == before
