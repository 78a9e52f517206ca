"""The folder of published weights, after a trainer was killed while it wrote to it."""

import anyio

from stream.durable import create_folder_atomically
from stream.queue.stage import RetryPolicy, Stage
from stream.trainer.consumer import Consumer, ResumePoint
from stream.trainer.lease import TrainerLease
from stream.trainer.ledger import Ledger
from workers.engine_api.discovery.discovery import EngineDiscovery
from workers.testing.scripted_engine import ScriptedEngine
from workers.train.publishing.paused_update import PausedUpdate
from workers.train.publishing.policy_versions import PolicyVersions
from workers.train.publishing.publisher import WeightPublisher
from workers.train.publishing.shared_folder import SharedFolderTransfer


def write(path) -> None:
    with create_folder_atomically(path) as folder:
        (folder / "model.safetensors").write_bytes(b"weights")


async def test_what_a_killed_trainer_left_half_written_goes_with_the_next_publication(tmp_path, connection):
    half_written = tmp_path / "weights" / ".v000001.0a1b.tmp"
    half_written.mkdir(parents=True)
    (half_written / "model.safetensors").write_bytes(b"half")
    trainer_lease = await TrainerLease.acquire(connection, 5.0)
    ledger = await anyio.to_thread.run_sync(Ledger, tmp_path / "ledger.jsonl")
    stage = Stage(connection, "scored", "trainer", RetryPolicy())
    consumer = Consumer(trainer_lease, stage, ledger, ResumePoint(), lambda group, _: group)
    async with ScriptedEngine(lambda *_: [1]) as engine, anyio.create_task_group() as tasks:
        way = PausedUpdate(SharedFolderTransfer())
        publisher = WeightPublisher(EngineDiscovery([engine.url]), way, retry_timeout_s=5, update_timeout_s=20)
        weights = PolicyVersions(tmp_path / "weights", consumer, publisher, tasks)
        for step in range(2):
            await weights.publish(write, step=step, metrics={})
    ledger.close()
    assert [path.name for path in sorted((tmp_path / "weights").iterdir())] == ["v000000", "v000001"]
