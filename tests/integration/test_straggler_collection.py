"""What the trainer takes and waits for under `pacing.stale_policy = "wait"`, on a real server."""

import anyio
import pytest
from msgspec.structs import replace

from stream.operator.run_control import pause, resume
from stream.queue.versions import inflight_versions
from stream.trainer.lease import TrainerLease
from stream.trainer.ledger import Ledger
from workers.settings.toml_file import parse_settings
from workers.train.groups.collector import Collector
from workers.train.groups.group_buffer import GroupBuffer
from workers.train.groups.outcome_recorder import EndedGroup, OutcomeRecorder
from workers.train.progress import Progress

SETTINGS = parse_settings(
    {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": [{"ref": "r:f"}], "filter": {"min_valid_rows": 1}}
    | {"train": {"batch_size": 1}, "pacing": {"stale_policy": "wait", "max_staleness": 1, "straggler_timeout_s": 50.0}}
)


class Trainer:
    """A trainer that does no more than end groups and publish; and the rollout worker that it waits for."""

    def __init__(self, pipe, tenure, ledger, settings):
        self.pipe, self.tenure = pipe, tenure
        self.version = 0
        self.stage = pipe.stage("scored", "trainer")
        self.endings = OutcomeRecorder(ledger, tenure, self.stage)
        self.hand = GroupBuffer(settings, ledger, vocab_size=10)
        self.stopping = anyio.Event()
        self.collector = Collector(settings, self.stage, self.hand, self.endings, Progress(), self.stopping)
        self.rollout = pipe.stage("prompts", "rollout", capacity=settings.capacity)
        self.under_way = {}

    async def claim(self, count=10):
        self.under_way |= {lease.prompt_id: lease for lease in (await self.rollout.claim(count)).leases}

    async def finish(self, *prompts):
        score = self.pipe.stage("groups", "score")
        for prompt in prompts:
            await self.rollout.complete(self.under_way.pop(prompt), "groups", self.pipe.group(prompt))
            (lease,) = (await score.claim(1)).leases
            await score.complete(lease, "scored", self.pipe.group(prompt))

    async def collect(self):
        with anyio.fail_after(20):
            return await self.collector.collect(self.version)

    async def step(self):
        """One step, and a version after it. Returns what was trained."""
        collected = await self.collect()
        leases, groups = self.hand.pop(collected.prompt_ids)
        ended = [EndedGroup(lease, "trained", group) for lease, group in zip(leases, groups, strict=True)]
        await self.endings.record(ended, 1, self.version, in_step=True)
        self.version += 1
        await self.tenure.publish(self.version, "path", 1, {})
        return collected.prompt_ids

    async def meanwhile(self, *doing):
        """Collect while something else happens, once the trainer waits."""
        found = []
        async with anyio.create_task_group() as tasks:

            async def collect():
                found.append(await self.collect())

            tasks.start_soon(collect)
            for each in doing:
                with anyio.fail_after(20):
                    while not self.collector._stragglers._waiting_for:
                        assert not found
                        await anyio.sleep(0.002)
                await each()
        return found[0]


@pytest.fixture
async def make_trainer(pipe, tmp_path):
    ledger = await anyio.to_thread.run_sync(Ledger, tmp_path / "ledger.jsonl")
    tenure = await TrainerLease.acquire(pipe.connection, 30.0)

    async def make(**pacing):
        trainer = Trainer(pipe, tenure, ledger, replace(SETTINGS, pacing=replace(SETTINGS.pacing, **pacing)))
        await tenure.publish(0, "path", 0, {})
        await pipe.feed(*"abcdef")
        await trainer.claim()
        return trainer

    yield make
    ledger.close()


async def test_the_step_waits_for_whom_the_next_version_would_make_too_old(make_trainer):
    trainer = await make_trainer()
    await trainer.finish("b")
    assert await trainer.step() == ["b"]
    await trainer.claim()
    await trainer.finish("c")
    assert await inflight_versions(trainer.pipe.connection) == {"a": 0, "c": 1}
    collected = await trainer.meanwhile(lambda: trainer.finish("a"))
    assert collected.batch == ["a"]
    assert collected.metrics["stragglers/seconds"] > 0
    assert collected.metrics["stragglers/abandoned"] == 0
    assert set(trainer.hand.groups) == {"a", "c"}
    assert await trainer.step() == ["a"]
    assert await trainer.step() == ["c"]


async def test_given_back_by_its_worker_it_is_awaited_no_more(make_trainer):
    trainer = await make_trainer()
    await trainer.finish("b")
    await trainer.step()
    await trainer.claim()
    await trainer.finish("c")
    collected = await trainer.meanwhile(lambda: trainer.rollout.release(trainer.under_way["a"], "none", ""))
    assert collected.batch == ["c"]


async def test_dead_it_is_awaited_no_more(make_trainer):
    trainer = await make_trainer()
    await trainer.finish("b")
    await trainer.step()
    await trainer.claim()
    await trainer.finish("c")
    collected = await trainer.meanwhile(lambda: trainer.rollout.dead_letter(trainer.under_way["a"], "unreadable", ""))
    assert collected.batch == ["c"]


async def test_after_the_time_out_the_step_goes_on_without_it_and_counts_it(make_trainer):
    trainer = await make_trainer(straggler_timeout_s=0.1)
    await trainer.finish("b")
    await trainer.step()
    await trainer.claim()
    await trainer.finish("c")
    collected = await trainer.collect()
    assert collected.batch == ["c"]
    assert collected.metrics["stragglers/abandoned"] == 1
    assert collected.metrics["stragglers/seconds"] >= 0.1
    await trainer.step()
    await trainer.claim()
    await trainer.finish("a", "d")
    assert await trainer.step() == ["a"]  # trained all the same, and before what may wait


async def test_while_the_run_is_paused_the_time_out_does_not_run(make_trainer):
    trainer = await make_trainer(straggler_timeout_s=0.1)
    await trainer.finish("b")
    await trainer.step()
    await trainer.claim()
    await trainer.finish("c")
    await pause(trainer.pipe.connection, "me")
    connection = trainer.pipe.connection
    collected = await trainer.meanwhile(lambda: anyio.sleep(0.5), lambda: resume(connection, "me"))
    assert collected.metrics["stragglers/abandoned"] == 1


async def test_a_stop_ends_the_waiting(make_trainer):
    trainer = await make_trainer()
    await trainer.finish("b")
    await trainer.step()
    await trainer.claim()
    await trainer.finish("c")

    async def stop():
        trainer.stopping.set()

    assert (await trainer.meanwhile(stop)).batch == []
    await trainer.collector.give_back()
    assert await inflight_versions(trainer.pipe.connection) == {"a": 0, "c": 1}


async def test_when_nothing_more_comes_what_is_in_hand_is_dealt_step_by_step(make_trainer, connection):
    trainer = await make_trainer(max_staleness=9)
    await trainer.finish(*"fedcba")
    await connection.write_hash("feed", {"done": "1"})
    dealt = []
    more = True
    while more:
        collected = await trainer.collect()
        dealt += collected.batch
        more = collected.more
        leases, groups = trainer.hand.deal(collected.batch)
        ended = [EndedGroup(lease, "trained", group) for lease, group in zip(leases, groups, strict=True)]
        await trainer.endings.end(ended, 1, trainer.version)
    assert dealt == list("abcdef")
    assert (await trainer.collect()).batch == []


async def test_what_has_ended_already_is_not_awaited_though_the_server_has_forgotten_it(make_trainer, connection):
    """It lost its last second: the ledger remembers that `b` was trained."""
    trainer = await make_trainer()
    await trainer.finish("b")
    await trainer.step()
    await trainer.claim()
    await trainer.finish("c", "a")
    await connection.redis.zadd(connection.key("inflight_versions"), {"b": 0})
    assert await trainer.step() == ["a"]
    assert await trainer.step() == ["c"]


@pytest.mark.parametrize("late", ["train", "cancel"])
async def test_otherwise_the_trainer_takes_what_comes(make_trainer, late):
    trainer = await make_trainer(late=late)
    await trainer.finish("b")
    assert await trainer.step() == ["b"]
    await trainer.claim()
    await trainer.finish("c")
    collected = await trainer.collect()
    assert (collected.batch, collected.metrics) == (["c"], {})
