"""Archive, ledger and marks when groups end, and when the disk is full."""

import resource
from contextlib import contextmanager, suppress
from pathlib import Path

import anyio
import pytest

from stream.connection.run_connection import connect
from stream.errors import RunFailedError
from stream.operator.status import read_status
from stream.trainer.archive import Archive, ArchivedGroups, scan_archive
from stream.trainer.consume import consume
from stream.trainer.consumer import Consumer
from stream.trainer.leased_group import ResumePoint
from stream.trainer.ledger import Ledger
from stream.trainer.ledger_records import LedgerEvent, content_hash
from stream.trainer.trainer_lease import TrainerLease
from workers.settings.toml_file import parse_settings
from workers.train.worker import _open_archive


@pytest.fixture
async def consumer(pipe, tmp_path):
    """A consumer with an archive, and three scored groups in its buffer."""
    ledger = await anyio.to_thread.run_sync(Ledger, tmp_path / "ledger.jsonl")
    archive = await anyio.to_thread.run_sync(Archive, tmp_path / "groups")
    await pipe.scored("a", "b", "c")
    trainer_lease = await TrainerLease.acquire(pipe.connection, 30.0)
    stage = pipe.stage("scored")
    consumer = Consumer(trainer_lease, stage, ledger, ResumePoint(), lambda group, _: group, archive=archive)
    await consumer.poll(3)
    yield consumer
    await anyio.to_thread.run_sync(ledger.close)
    await anyio.to_thread.run_sync(archive.close)


@contextmanager
def full_disk(limit: int):
    """Limit the size of files to `limit` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_group_is_archived_as_it_was_leased(consumer, tmp_path):
    groups = consumer.pop(["a", "b"])
    await consumer.commit(groups, 1)

    def archived():
        return {line.prompt: (line.step, place.read_payload()) for line, place in scan_archive(tmp_path / "groups")}

    assert await anyio.to_thread.run_sync(archived) == {g.group.prompt.id: (1, g.lease.payload) for g in groups}


async def test_the_archive_is_forced_to_disk_before_the_ledger(consumer, monkeypatch):
    synced = []
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append(_name(descriptor)))
    await consumer.commit(consumer.pop("abc"), 1)
    await consumer.checkpoint(lambda _: None)
    assert synced[-1].endswith("ledger.jsonl")
    assert any(name.endswith(".groups") for name in synced[:-1])


def _name(descriptor: int) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())


async def test_a_full_archive_marks_nothing(consumer, pipe, tmp_path):
    groups = consumer.pop("abc")
    with full_disk(100), pytest.raises(RunFailedError, match=r"groups/000001.groups"):
        await consumer.commit(groups, 1)
    assert (await pipe.prompt_counts())["trained"] == 0
    assert (await read_status(pipe.connection)).unfinished == 3
    assert consumer.ledger.outcomes == {}
    assert (tmp_path / "ledger.jsonl").stat().st_size == 0
    await consumer.commit(groups, 1)
    assert (await pipe.prompt_counts())["trained"] == 3
    archived = await anyio.to_thread.run_sync(ArchivedGroups, tmp_path / "groups")
    assert all((g.group.prompt.id, content_hash(g.group)) in archived for g in groups)


async def test_a_full_ledger_marks_nothing_and_its_torn_record_is_cut(pipe, tmp_path):
    await pipe.scored("a", "b", "c")
    ledger = await anyio.to_thread.run_sync(Ledger, tmp_path / "ledger.jsonl")
    trainer_lease = await TrainerLease.acquire(pipe.connection, 30.0)
    consumer = Consumer(trainer_lease, pipe.stage("scored"), ledger, ResumePoint(), lambda group, _: group)
    await consumer.poll(3)
    with full_disk(100), pytest.raises(RunFailedError, match=r"ledger.jsonl could not be written"):
        await consumer.commit(consumer.pop("abc"), 1)
    assert (await pipe.prompt_counts())["trained"] == 0
    assert ledger.outcomes == {}
    await anyio.to_thread.run_sync(ledger.close)
    reopened = await anyio.to_thread.run_sync(Ledger, tmp_path / "ledger.jsonl")
    assert reopened.outcomes == {}
    await anyio.to_thread.run_sync(reopened.close)


async def test_a_trainer_tells_everybody_what_it_waits_for_and_goes_on_with_room(pipe, tiny_disk, redis_url, run_name):
    await pipe.scored("a", "b")
    async with (
        connect(redis_url, run_name) as viewer,
        consume(pipe.connection, tiny_disk / "ledger.jsonl", lease_s=2.0) as consumer,
    ):
        groups = await consumer.claim(2)
        await anyio.to_thread.run_sync(fill, tiny_disk)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_commit_large, consumer, groups)
            with anyio.fail_after(10):
                while not (found := (await read_status(viewer)).disk_waits):
                    await anyio.sleep(0.05)
            assert found[0].path == str(tiny_disk / "ledger.jsonl")
            assert found[0].why == "No space left on device"
            await anyio.Path(tiny_disk / "ballast").unlink()
        with anyio.fail_after(10):
            while (await read_status(viewer)).disk_waits:
                await anyio.sleep(0.05)
        assert (await pipe.prompt_counts())["trained"] == 2


def fill(folder):
    """Write until there is no room."""
    with (folder / "ballast").open("ab", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass


async def _commit_large(consumer, groups):
    """Commit with records that need another block of the disk."""
    event = LedgerEvent("note", 1, {"text": "x" * 5000})
    await anyio.to_thread.run_sync(consumer.ledger.append_event, event)
    await consumer.commit(groups, 1)


def test_how_much_is_archived_is_a_setting(tmp_path):
    def opened(**keys) -> Archive | None:
        table = {
            "run": {"folder": str(tmp_path)},
            "model": {"path": "m"},
            "data": {"path": "d"},
            "rewards": [{"ref": "a"}],
        }
        return _open_archive(parse_settings(table | {"archive": keys}), None)

    assert opened()._max_bytes == 1_024_000_000
    assert opened(keep=3)._max_bytes == 3_000_000
    assert opened(keep="all")._max_bytes is None
    assert opened(keep="none") is None
    assert (opened()._trained_tokens._max_bytes, opened(keep="all")._trained_tokens._max_bytes) == (256_000_000, None)
    assert opened().folder == tmp_path / "groups"
