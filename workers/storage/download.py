"""Brings a run's files back from object storage."""

import os
from pathlib import Path
from typing import Final

import msgspec

from stream.durable import fsync_path, remove_folder, write_file_atomically
from stream.errors import DamagedObjectError, StorageError
from workers.storage.bucket import Bucket
from workers.storage.snapshot import Part, Snapshot, hash_bytes

STAGING: Final = ".restoring"
"""Folder in the run's folder while it is restored; what was begun with it is begun again."""
RESTORED: Final = "restored.json"
"""File in the run's folder until a trainer has resumed from what was restored."""
_LEDGER: Final = "ledger.jsonl"
_CHECKPOINTS: Final = "checkpoints"


def download_snapshot(bucket: Bucket, snapshot: Snapshot, folder: Path) -> int:
    """Write all files of a snapshot to a run's folder; each part is verified. Blocks. Returns the number of bytes.

    The ledger and the checkpoint get their names last: a run without a checkpoint is restored again.

    Raises:
        DamagedObjectError: a part is missing or was altered; the folder has no checkpoint.
        StorageError: storage does not answer; the same holds.
        OSError: the disk is full or fails; the same holds.
    """
    staging = folder / STAGING
    _clear(staging)
    for name, parts in snapshot.files.items():
        _download_file(bucket, parts, _below(staging, name))
    for checkpoint in (folder / _CHECKPOINTS).glob("step-*"):  # of another snapshot, whose restoration was interrupted
        remove_folder(checkpoint)
    names = sorted(snapshot.files, key=lambda name: (name.startswith(f"{_CHECKPOINTS}/"), name == _LEDGER))
    for name in names:
        if not name.startswith(f"{_CHECKPOINTS}/"):
            _move(staging / name, folder / name)
    note = msgspec.json.encode({"url": bucket.url, "step": snapshot.step})
    write_file_atomically(folder / RESTORED, note + b"\n")
    for checkpoint in sorted((staging / _CHECKPOINTS).glob("*")):
        _move(checkpoint, folder / _CHECKPOINTS / checkpoint.name)
    return sum(part.size for parts in snapshot.files.values() for part in parts)


def _download_file(bucket: Bucket, parts: tuple[Part, ...], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        for part in parts:
            content = bucket.get(part.key)
            if len(content) != part.size or hash_bytes(content) != part.blake2b:
                raise DamagedObjectError(f"{bucket.url}/{part.key} was altered: it is not what the trainer uploaded")
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fsync_path(target.parent)


def _clear(staging: Path) -> None:
    """Remove what was downloaded of another snapshot. The folder stays: it marks the run's folder as not restored."""
    staging.mkdir(parents=True, exist_ok=True)
    for path in staging.iterdir():
        if path.is_dir():
            remove_folder(path)
        else:
            path.unlink()


def _below(folder: Path, name: str) -> Path:
    """Return a path below a folder.

    Raises:
        StorageError: the name leads out of the folder.
    """
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise StorageError(f"a snapshot in storage names the file {name!r}, which is not below the run's folder")
    return path


def _move(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    source.rename(target)
    fsync_path(target.parent)
