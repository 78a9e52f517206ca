"""Publication of policy versions: their folders and their numbers."""

from contextlib import asynccontextmanager

import anyio
import pytest

from stream.durable import create_folder_atomically
from stream.errors import FencedError
from stream.queue.stage import RetryPolicy, Stage
from stream.trainer.consumer import Consumer
from stream.trainer.leased_group import ResumePoint
from stream.trainer.ledger import Ledger
from stream.trainer.trainer_lease import TrainerLease
from tests.scripted_engine.engine import ScriptedEngine
from workers.engine_api.discovery import EngineDiscovery
from workers.train.publishing.policy_versions import PolicyVersions
from workers.train.publishing.publisher import WeightPublisher
from workers.train.publishing.transport import PausedUpdate, SharedFolderTransfer


def write(path) -> None:
    with create_folder_atomically(path) as folder:
        (folder / "model.safetensors").write_bytes(b"weights")


@pytest.fixture
async def consumer(tmp_path, connection):
    trainer_lease = await TrainerLease.acquire(connection, 5.0)
    ledger = await anyio.to_thread.run_sync(Ledger, tmp_path / "ledger.jsonl")
    stage = Stage(connection, "scored", "trainer", RetryPolicy())
    yield Consumer(trainer_lease, stage, ledger, ResumePoint(), lambda group, _: group)
    ledger.close()


@asynccontextmanager
async def policy_versions(folder, consumer, engine):
    publisher = WeightPublisher(
        EngineDiscovery([engine.url]), PausedUpdate(SharedFolderTransfer()), retry_timeout_s=5, update_timeout_s=20
    )
    async with anyio.create_task_group() as tasks:
        yield PolicyVersions(folder, consumer, publisher, tasks)


async def test_a_publication_removes_half_written_folders_of_a_killed_trainer(tmp_path, consumer):
    folder = tmp_path / "weights"
    half_written = folder / ".v000001.0a1b.tmp"
    half_written.mkdir(parents=True)
    (half_written / "model.safetensors").write_bytes(b"half")
    async with ScriptedEngine(lambda *_: [1]) as engine, policy_versions(folder, consumer, engine) as versions:
        for step in range(2):
            await versions.publish(await versions.reserve(), write, step=step, metrics={})
    assert [path.name for path in sorted(folder.iterdir())] == ["v000000", "v000001"]


async def test_a_version_number_that_an_engine_has_is_not_reused(tmp_path, consumer):
    async with (
        ScriptedEngine(lambda *_: [1], version="7") as engine,
        policy_versions(tmp_path / "weights", consumer, engine) as versions,
    ):
        await versions.publish(await versions.reserve(), write, step=0, metrics={})
    assert (consumer.version, engine.version) == (8, "8")


async def test_a_trainer_that_was_succeeded_while_it_wrote_pushes_nothing(tmp_path, connection):
    """Engines do not check fencing tokens, so the trainer asks the server before it pushes."""
    trainer_lease = await TrainerLease.acquire(connection, 0.2)
    ledger = await anyio.to_thread.run_sync(Ledger, tmp_path / "ledger.jsonl")
    stage = Stage(connection, "scored", "trainer", RetryPolicy())
    consumer = Consumer(trainer_lease, stage, ledger, ResumePoint(), lambda group, _: group)

    def write_slowly(path) -> None:
        write(path)
        anyio.from_thread.run(TrainerLease.acquire, connection, 5.0)  # waits until the lease of 0.2 s has expired

    async with ScriptedEngine(lambda *_: [1]) as engine:
        with pytest.raises(ExceptionGroup) as caught:
            async with policy_versions(tmp_path / "weights", consumer, engine) as versions:
                await versions.publish(await versions.reserve(), write_slowly, step=0, metrics={})
        assert caught.group_contains(FencedError)
        assert engine.pushes == []
    ledger.close()


async def test_three_versions_stay_on_disk(tmp_path, consumer):
    folder = tmp_path / "weights"
    async with ScriptedEngine(lambda *_: [1]) as engine, policy_versions(folder, consumer, engine) as versions:
        for step in range(5):
            await versions.publish(await versions.reserve(), write, step=step, metrics={})
    assert [path.name for path in sorted(folder.iterdir())] == ["v000002", "v000003", "v000004"]
