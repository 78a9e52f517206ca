"""What a group's end leaves behind where the disk is full: no mark, no line that is believed, and a clear error."""

import resource
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from stream.codec import decode
from stream.errors import RunFailedError
from stream.operator.run_status import read_status
from stream.records import Group
from stream.trainer.archive import Archive, ArchivedGroups, scan_archive
from stream.trainer.lease import TrainerLease
from stream.trainer.ledger import Ledger, content_hash
from workers.settings.toml_file import parse_settings
from workers.train.groups.outcome_recorder import EndedGroup, OutcomeRecorder
from workers.train.worker import _open_archive


@pytest.fixture
async def books(pipe, tmp_path):
    """Three scored groups, leased, and the trainer's books."""
    ledger = await anyio.to_thread.run_sync(Ledger, tmp_path / "ledger.jsonl")
    archive = await anyio.to_thread.run_sync(Archive, tmp_path / "groups")
    await pipe.scored("a", "b", "c")
    tenure = await TrainerLease.acquire(pipe.connection, 30.0)
    stage = pipe.stage("scored")
    leases = (await stage.claim(3)).leases
    yield (
        OutcomeRecorder(ledger, tenure, stage, archive),
        [EndedGroup(lease, "trained", decode(lease.payload, Group)) for lease in leases],
    )
    await anyio.to_thread.run_sync(ledger.close)
    await anyio.to_thread.run_sync(archive.close)


@contextmanager
def full_disk(at: int):
    """No file may grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (at, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_group_that_ended_is_in_the_archive_as_it_was_leased(books, tmp_path):
    endings, ended = books
    again = EndedGroup(ended[2].lease, "already:trained", None)
    await endings.end([*ended[:2], again], step=1, version=0)
    await endings.sync()

    def kept():
        return {line.prompt: (line.step, place.read_payload()) for line, place in scan_archive(tmp_path / "groups")}

    assert await anyio.to_thread.run_sync(kept) == {e.group.prompt.id: (1, e.lease.payload) for e in ended[:2]}


async def test_a_durable_line_is_of_a_group_that_is_durable(books, tmp_path, monkeypatch):
    endings, ended = books
    synced = []
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append(_name(descriptor)))
    await endings.end(ended, step=1, version=0)
    await endings.sync()
    assert synced[-1].endswith("ledger.jsonl")
    assert any(name.endswith(".groups") for name in synced[:-1])


def _name(descriptor: int) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())


async def test_an_archive_that_is_full_ends_the_run_with_nothing_marked(books, pipe, tmp_path):
    endings, ended = books
    with full_disk(100), pytest.raises(RunFailedError, match=r"groups/000001.groups"):
        await endings.end(ended, step=1, version=0)
    assert (await pipe.balance())["trained"] == 0
    assert (await read_status(pipe.connection)).unfinished == 3
    assert endings.ledger.ends == {}
    assert (tmp_path / "ledger.jsonl").stat().st_size == 0
    await endings.end(ended, step=1, version=0)
    assert (await pipe.balance())["trained"] == 3
    found = await anyio.to_thread.run_sync(ArchivedGroups, tmp_path / "groups")
    assert all(("abc"[i], content_hash(e.group)) in found for i, e in enumerate(ended))


async def test_a_ledger_that_is_full_ends_the_run_with_nothing_marked(books, pipe, tmp_path):
    endings, ended = books
    ledger = endings.ledger
    monitor = OutcomeRecorder(ledger, endings._tenure, endings._stage)
    with full_disk(100), pytest.raises(RunFailedError, match=r"ledger.jsonl could not be written"):
        await monitor.record(ended, step=1, version=0)
    assert (await pipe.balance())["trained"] == 0
    assert ledger.ends == {}
    await anyio.to_thread.run_sync(ledger.close)
    again = await anyio.to_thread.run_sync(Ledger, tmp_path / "ledger.jsonl")  # the torn line is cut
    assert again.outcomes == {}
    await anyio.to_thread.run_sync(again.close)


def test_how_much_is_kept_is_a_setting(tmp_path):
    def begun(**keys) -> Archive | None:
        table = {
            "run": {"folder": str(tmp_path)},
            "model": {"path": "m"},
            "data": {"path": "d"},
            "rewards": [{"ref": "a"}],
        }
        return _open_archive(parse_settings(table | {"archive": keys}), None)

    assert begun()._max_bytes == 1_024_000_000
    assert begun(keep="latest", megabytes=3)._max_bytes == 3_000_000
    assert begun(keep="all", megabytes=3)._max_bytes is None
    assert begun(keep="none") is None
    assert begun().folder == tmp_path / "groups"
