"""Restores a run whose folder was lost, from object storage, before anything else looks at the folder."""

import shutil
from pathlib import Path
from typing import Final

from msgspec import Struct

from stream.connection.run_identity import read_identity
from stream.errors import DamagedObjectError, RunMismatchError, StorageError
from workers.runs.folder import lock_folder, unusable_folder
from workers.settings import Settings
from workers.storage.bucket import Bucket
from workers.storage.download import STAGING, download_snapshot
from workers.storage.snapshot import belongs_to, intact_snapshots, list_snapshots, newest_snapshot

_ATTEMPTS: Final = 3
"""A trainer that is still alive elsewhere may delete objects of a snapshot while it is read."""


class Restored(Struct, frozen=True):
    """What was restored."""

    url: str
    step: int
    bytes: int
    problem: str = ""
    """Why a newer snapshot could not be used; empty: this is the newest."""


def restore_if_lost(settings: Settings) -> Restored | None:
    """Download the run's newest snapshot if the run's folder holds nothing and storage has one. Blocks.

    Returns:
        None if there was nothing to restore.

    Raises:
        StorageError: storage does not answer, so a lost run looks like a new one; the disk is full; or the folder was
            restored in part, and the rest is not in storage.
        RunMismatchError: storage holds another run of this name.
    """
    folder = settings.folder
    url = settings.storage.url
    if not url or not _is_lost(folder):
        _refuse_part(folder, "storage.url is not set")
        return None
    bucket = Bucket(f"{url.rstrip('/')}/{settings.run.name}")
    if (snapshot := newest_snapshot(bucket)) is None:
        _refuse_part(folder, f"{bucket.url} has no copy of it")
        return None
    identity = read_identity(folder)
    if identity is not None and identity.id != snapshot.run_id:
        raise RunMismatchError(
            f"{folder} belongs to run {identity.id[:8]}, and {bucket.url} holds run {snapshot.run_id[:8]} of the same "
            "name: give this run another run.name, or set another storage.url"
        )
    with lock_folder(folder):
        restored = _download(bucket, snapshot.run_id, folder)
        shutil.rmtree(folder / STAGING)
    return restored


def _refuse_part(folder: Path, why: str) -> None:
    if _is_restored_in_part(folder):
        raise StorageError(
            f"{folder} was restored in part, and {why}: set storage.url as it was, and start again; to begin the run "
            "anew, remove the folder"
        )


def _is_lost(folder: Path) -> bool:
    if _is_restored_in_part(folder):
        return True
    has_ledger = (folder / "ledger.jsonl").exists() and (folder / "ledger.jsonl").stat().st_size > 0
    return not has_ledger and not any((folder / "checkpoints").glob("step-*"))


def _is_restored_in_part(folder: Path) -> bool:
    with unusable_folder(folder):
        return (folder / STAGING).exists()


def _download(bucket: Bucket, run_id: str, folder: Path) -> Restored:
    """Download the newest snapshot, or an older one if objects of the newest are damaged.

    Raises:
        DamagedObjectError: objects of all snapshots are damaged.
        RunMismatchError: there are snapshots of two runs.
        StorageError: storage does not answer, or the disk is full.
    """
    problem, tried = "", ""
    for _ in range(_ATTEMPTS):
        keys = list_snapshots(bucket)
        if foreign := [key for key in keys if not belongs_to(key, run_id)]:
            raise RunMismatchError(
                f"{bucket.url} holds two runs of one name: move one run's objects away; {foreign[-1]} belongs to one"
            )
        if not keys or keys[-1] == tried:
            break  # no trainer writes there
        problem, tried = "", keys[-1]
        for snapshot in intact_snapshots(bucket, keys):
            try:
                size = download_snapshot(bucket, snapshot, folder)
            except DamagedObjectError as error:
                problem = problem or str(error)
            except OSError as error:
                raise StorageError(
                    f"{folder} could not be restored from {bucket.url}: {error}; make room on that disk, and start "
                    "again"
                ) from error
            else:
                return Restored(url=bucket.url, step=snapshot.step, bytes=size, problem=problem)
    raise DamagedObjectError(problem or f"{bucket.url}: snapshots disappear while they are read; stop their trainer")
