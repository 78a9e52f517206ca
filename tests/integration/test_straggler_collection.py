"""Which groups the trainer takes and waits for with `pacing.stale_policy = "wait"`, on a real server."""

import anyio
import anyio.lowlevel
import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from stream.operator.control import pause, resume
from stream.queue.stage import inflight_versions
from stream.trainer.consumer import Consumer
from stream.trainer.leased_group import ResumePoint
from stream.trainer.ledger import Ledger
from stream.trainer.trainer_lease import TrainerLease
from workers.role import work_loop
from workers.runs.progress import Progress
from workers.settings.toml_file import parse_settings
from workers.train.groups.collector import Collector
from workers.train.groups.group_checker import GroupChecker

SETTINGS = parse_settings(
    {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": [{"ref": "r:f"}], "filter": {"min_valid_rows": 1}}
    | {"train": {"batch_size": 1}, "pacing": {"stale_policy": "wait", "max_staleness": 1}}
)


class Trainer:
    """A trainer that only ends groups and publishes, and the rollout worker that it waits for."""

    def __init__(self, pipe, trainer_lease, ledger, settings):
        self.pipe, self.trainer_lease = pipe, trainer_lease
        self.stage = pipe.stage("scored", "trainer")
        checker = GroupChecker(settings, 10, Progress())
        self.consumer = Consumer(trainer_lease, self.stage, ledger, ResumePoint(version=0), checker.check)
        self.collector = Collector(settings, self.consumer, checker)
        self.rollout = pipe.stage("prompts", "rollout", capacity=settings.capacity)
        self.in_flight = {}

    async def claim(self, count=10):
        self.in_flight |= {lease.prompt_id: lease for lease in (await self.rollout.claim(count)).leases}

    async def finish(self, *prompts):
        score = self.pipe.stage("groups", "score")
        for prompt in prompts:
            await self.rollout.complete(self.in_flight.pop(prompt), "groups", self.pipe.group(prompt))
            (lease,) = (await score.claim(1)).leases
            await score.complete(lease, "scored", self.pipe.group(prompt))

    async def collect(self):
        with anyio.fail_after(20):
            return await self.collector.collect()

    async def step(self):
        """Run one step and announce the next version. Return the prompts that were trained on."""
        batch = await self.collect()
        await self.consumer.commit(self.consumer.pop(batch.prompt_ids), 1)
        await self.consumer.announce(self.consumer.version + 1, "path", 1)
        return batch.prompt_ids

    async def meanwhile(self, *actions):
        """Collect, and run each action once the trainer waits for stragglers."""
        batches = []
        async with anyio.create_task_group() as tasks:

            async def collect():
                batches.append(await self.collect())

            tasks.start_soon(collect)
            for action in actions:
                with anyio.fail_after(20):
                    while not self.collector._stragglers._waiting_for:
                        assert not batches
                        await anyio.sleep(0.002)
                await action()
        return batches[0]


@pytest.fixture
async def make_trainer(pipe, tmp_path):
    ledger = await anyio.to_thread.run_sync(Ledger, tmp_path / "ledger.jsonl")
    trainer_lease = await TrainerLease.acquire(pipe.connection, 30.0)

    async def make(wait_s=50.0, **pacing):
        abort = replace(SETTINGS.abort, stall_timeout_s=2 * wait_s)
        settings = replace(SETTINGS, abort=abort, pacing=replace(SETTINGS.pacing, **pacing))
        trainer = Trainer(pipe, trainer_lease, ledger, settings)
        await trainer.consumer.announce(0, "path", 0)
        await pipe.feed(*"abcdef")
        await trainer.claim()
        return trainer

    yield make
    ledger.close()


async def test_a_step_waits_for_a_group_that_would_be_too_old_later(make_trainer):
    trainer = await make_trainer()
    await trainer.finish("b")
    assert await trainer.step() == ["b"]
    await trainer.claim()
    await trainer.finish("c")
    assert await inflight_versions(trainer.pipe.connection) == {"a": 0, "c": 1}
    collected = await trainer.meanwhile(lambda: trainer.finish("a"))
    assert collected.prompt_ids == ["a"]
    assert collected.metrics["stragglers/seconds"] > 0
    assert collected.metrics["stragglers/abandoned"] == 0
    assert set(trainer.consumer.buffer) == {"a", "c"}
    assert await trainer.step() == ["a"]
    assert await trainer.step() == ["c"]


async def test_a_released_group_is_no_longer_waited_for(make_trainer):
    trainer = await make_trainer()
    await trainer.finish("b")
    await trainer.step()
    await trainer.claim()
    await trainer.finish("c")
    collected = await trainer.meanwhile(lambda: trainer.rollout.release(trainer.in_flight["a"], "none", ""))
    assert collected.prompt_ids == ["c"]


async def test_a_dead_letter_is_no_longer_waited_for(make_trainer):
    trainer = await make_trainer()
    await trainer.finish("b")
    await trainer.step()
    await trainer.claim()
    await trainer.finish("c")
    collected = await trainer.meanwhile(lambda: trainer.rollout.dead_letter(trainer.in_flight["a"], "unreadable", ""))
    assert collected.prompt_ids == ["c"]


async def test_after_the_timeout_the_step_continues_without_the_straggler_and_counts_it(make_trainer):
    trainer = await make_trainer(wait_s=0.1)
    await trainer.finish("b")
    await trainer.step()
    await trainer.claim()
    await trainer.finish("c")
    collected = await trainer.collect()
    assert collected.prompt_ids == ["c"]
    assert collected.metrics["stragglers/abandoned"] == 1
    assert collected.metrics["stragglers/seconds"] >= 0.1
    await trainer.step()
    await trainer.claim()
    await trainer.finish("a", "d")
    assert await trainer.step() == ["a"]  # before "d", which can wait


async def test_the_timeout_does_not_run_while_the_run_is_paused(make_trainer):
    trainer = await make_trainer(wait_s=0.1)
    await trainer.finish("b")
    await trainer.step()
    await trainer.claim()
    await trainer.finish("c")
    await pause(trainer.pipe.connection, "me")
    connection = trainer.pipe.connection
    collected = await trainer.meanwhile(lambda: anyio.sleep(0.5), lambda: resume(connection, "me"))
    assert collected.metrics["stragglers/abandoned"] == 1


async def test_a_stop_request_ends_the_wait(make_trainer):
    trainer = await make_trainer()
    await trainer.finish("b")
    await trainer.step()
    await trainer.claim()
    await trainer.finish("c")

    async def stop():
        trainer.pipe.connection.stopping.set()

    assert (await trainer.meanwhile(stop)).prompt_ids == []
    await trainer.consumer.release_all()
    assert await inflight_versions(trainer.pipe.connection) == {"a": 0, "c": 1}


async def test_the_last_buffered_groups_are_trained_step_by_step(make_trainer, connection):
    trainer = await make_trainer(max_staleness=9)
    await trainer.finish(*"fedcba")
    await connection.write_hash("feed", {"done": "1"})
    trained = []
    has_more = True
    while has_more:
        collected = await trainer.collect()
        trained += collected.prompt_ids
        has_more = collected.has_more
        await trainer.consumer.commit(trainer.consumer.pop(collected.prompt_ids), 1)
    assert trained == list("abcdef")
    assert (await trainer.collect()).prompt_ids == []


async def test_a_group_in_the_ledger_is_not_waited_for_though_the_server_forgot_its_outcome(make_trainer, connection):
    trainer = await make_trainer()
    await trainer.finish("b")
    await trainer.step()
    await trainer.claim()
    await trainer.finish("c", "a")
    await connection.redis.zadd(connection.key("inflight_versions"), {"b": 0})
    assert await trainer.step() == ["a"]
    assert await trainer.step() == ["c"]


@pytest.mark.parametrize("stale_policy", ["train", "cancel"])
async def test_other_policies_take_groups_as_they_come(make_trainer, stale_policy):
    trainer = await make_trainer(stale_policy=stale_policy)
    await trainer.finish("b")
    assert await trainer.step() == ["b"]
    await trainer.claim()
    await trainer.finish("c")
    collected = await trainer.collect()
    assert (collected.prompt_ids, collected.metrics.keys()) == (["c"], {"waiting_seconds"})


async def test_groups_of_the_next_step_are_received_while_one_trains(make_trainer):
    """A cancelled poll ends properly first, so that no group stays leased without being buffered."""
    trainer = await make_trainer(stale_policy="train")
    await trainer.finish("a")
    batch = await trainer.collect()
    assert batch.prompt_ids == ["a"]
    assert 0 <= batch.metrics["waiting_seconds"] < 10
    trainer.consumer.pop(batch.prompt_ids)
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(trainer.collector.prefetch)
            await trainer.finish("b")
            while len(trainer.stage.leases) < 2:  # that of the step in training, and the new one
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        assert set(trainer.consumer.buffer) == {"b"}
        await trainer.collector.prefetch()  # the buffer is full
    assert (await trainer.collect()).prompt_ids == ["b"]


async def test_a_long_wait_for_groups_is_logged(make_trainer, monkeypatch):
    monkeypatch.setattr(work_loop, "MAX_BLOCK_S", 0.0)  # every wait is long
    trainer = await make_trainer()
    await trainer.finish("b")
    assert await trainer.step() == ["b"]
    await trainer.claim()
    await trainer.finish("c")
    with capture_logs() as logs:
        await trainer.meanwhile(lambda: trainer.finish("a"))
    assert ("work.waiting", "scored") in [(log["event"], log.get("stage")) for log in logs]
