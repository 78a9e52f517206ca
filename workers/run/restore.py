"""Restores a run whose folder was lost, from object storage, before anything else looks at the folder."""

import shutil
from pathlib import Path
from typing import Final

from msgspec import Struct

from stream.connection.run_identity import read_identity
from stream.errors import RunMismatchError, StorageError
from workers.run.run_folder import lock_folder
from workers.settings import Settings
from workers.storage.bucket import Bucket
from workers.storage.download import STAGING, download_snapshot
from workers.storage.snapshot import Snapshot, newest_snapshot

_ATTEMPTS: Final = 3
"""A trainer that is still alive elsewhere may delete objects of a snapshot while it is read."""


class Restored(Struct, frozen=True):
    """What was restored."""

    url: str
    step: int
    bytes: int


def restore_if_lost(settings: Settings) -> Restored | None:
    """Download the run's newest snapshot if the run's folder holds nothing and storage has one. Blocks.

    Returns:
        None if there was nothing to restore.

    Raises:
        StorageError: storage does not answer, so a lost run looks like a new one; or the disk is full.
        RunMismatchError: storage holds another run of this name.
    """
    folder = settings.folder
    if not settings.storage.url or not _is_lost(folder):
        return None
    bucket = Bucket(f"{settings.storage.url.rstrip('/')}/{settings.run.name}")
    if (snapshot := newest_snapshot(bucket)) is None:
        return None
    identity = read_identity(folder)
    if identity is not None and identity.id != snapshot.run_id:
        raise RunMismatchError(
            f"{folder} belongs to run {identity.id[:8]}, and {bucket.url} holds run {snapshot.run_id[:8]} of the same "
            "name: give this run another run.name, or set another storage.url"
        )
    with lock_folder(folder):
        snapshot, size = _download(bucket, snapshot, folder)
        shutil.rmtree(folder / STAGING)
    return Restored(url=bucket.url, step=snapshot.step, bytes=size)


def _is_lost(folder: Path) -> bool:
    if (folder / STAGING).exists():
        return True
    has_ledger = (folder / "ledger.jsonl").exists() and (folder / "ledger.jsonl").stat().st_size > 0
    return not has_ledger and not any((folder / "checkpoints").glob("step-*"))


def _download(bucket: Bucket, snapshot: Snapshot, folder: Path) -> tuple[Snapshot, int]:
    for attempt in range(_ATTEMPTS):
        try:
            return snapshot, download_snapshot(bucket, snapshot, folder)
        except StorageError:
            newest = newest_snapshot(bucket)
            if newest is None or newest == snapshot or attempt == _ATTEMPTS - 1:
                raise
            snapshot = newest
        except OSError as error:
            raise StorageError(
                f"{folder} could not be restored from {bucket.url}: {error}; make room on that disk, and start again"
            ) from error
    raise StorageError(f"{bucket.url}: snapshots disappear while they are read; stop the trainer that writes them")
