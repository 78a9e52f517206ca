"""Copies checkpoints, ledger and archive to object storage, in a thread that never delays a step.

At most one snapshot is uploaded and one waits: the newest checkpoint replaces an older one that waits. Pieces that an
earlier snapshot has are not uploaded again. What is appended to a file becomes a new part, joined with its predecessors
while they are smaller, so a long file has few parts and each byte is uploaded few times.
"""

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Condition, Thread
from typing import BinaryIO, Final

import structlog
from msgspec import Struct

from stream.backoff import Backoff
from stream.connection.run_identity import IDENTITY_FILE
from stream.errors import DamagedObjectError, FencedError, PenstockError, RunMismatchError, StorageError
from stream.trainer.folder_lock import LOCK_FILE, RunFolderLock
from workers.storage.bucket import Bucket
from workers.storage.snapshot import (
    OBJECTS,
    Part,
    Snapshot,
    belongs_to,
    hash_bytes,
    intact_snapshots,
    list_snapshots,
    object_key,
    read_snapshot,
    snapshot_key,
    token_of,
)

log = structlog.get_logger()

PART_BYTES: Final = 64_000_000
_KEPT_SNAPSHOTS: Final = 2
_CLOSE_TIMEOUT_S: Final = 600.0
"""How long the end of a trainer waits for the last snapshot."""
_BACKOFF: Final = Backoff(1.0, 60.0)
_FOLDERS: Final = ("groups", "annotations", "rows")
_FILES: Final = (IDENTITY_FILE, LOCK_FILE, "run.toml", "eval.jsonl")
_APPENDED: Final = (".jsonl", ".groups")
"""Files that only grow while a trainer lives."""


class SavedCheckpoint(Struct, frozen=True):
    """A checkpoint in the run's folder, and the lengths that other files had then."""

    folder: Path
    step: int
    ledger_bytes: int
    metrics_bytes: int


class SnapshotUploader:
    """Uploads snapshots in a thread of its own, until it is closed.

    Args:
        bucket: below which the run's copy is.
        folder: of the run.
        run: its name.
        run_id: of the run; storage that holds another run is not changed.
        folder_lock: the trainer's lock on the run's folder; its token orders snapshots.
        excluded: paths relative to the folder that are not copied.
        backoff: between attempts while storage fails.
    """

    def __init__(
        self,
        bucket: Bucket,
        folder: Path,
        run: str,
        run_id: str,
        folder_lock: RunFolderLock,
        excluded: frozenset[str] = frozenset(),
        backoff: Backoff = _BACKOFF,
    ) -> None:
        self._bucket, self._folder, self._run, self._run_id = bucket, folder, run, run_id
        self._folder_lock, self._excluded, self._backoff = folder_lock, excluded, backoff
        self._changed = Condition()
        self._waiting: SavedCheckpoint | None = None
        self._uploading: SavedCheckpoint | None = None
        self._closing_at: float | None = None
        self._stored: dict[str, tuple[Part, ...]] | None = None
        """Files of the newest snapshot, and of one that is being uploaded; None: not read yet."""
        self._present: dict[str, int] = {}
        """Size of each object in storage, when the upload in progress began; other tools may delete objects."""
        self._seen: dict[str, tuple[int, int]] = {}
        """Size and modification time of files that this trainer has uploaded or compared."""
        self._thread = Thread(target=self._work, name="storage", daemon=True)
        self._thread.start()

    @property
    def in_use(self) -> set[Path]:
        """Folders of checkpoints that must not be removed yet."""
        with self._changed:
            return {each.folder for each in (self._waiting, self._uploading) if each is not None}

    def request(self, checkpoint: SavedCheckpoint) -> None:
        """Have a checkpoint uploaded; returns immediately. One that still waits is replaced."""
        with self._changed:
            if not self._thread.is_alive():
                return
            self._waiting = checkpoint
            self._changed.notify_all()

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Wait until the last checkpoint is in storage, and end the thread. Blocks."""
        with self._changed:
            self._closing_at = time.monotonic() + timeout_s
            self._changed.notify_all()
        self._thread.join(timeout_s + 1.0)
        left = self._waiting or self._uploading
        if left is not None:
            log.error(
                "storage.incomplete",
                url=self._bucket.url,
                step=left.step,
                why="the last checkpoint is in the run's folder alone; the next start of the trainer copies it",
            )

    def _work(self) -> None:
        attempt = 0
        while (checkpoint := self._take()) is not None:
            try:
                self._upload(checkpoint)
            except (FencedError, RunMismatchError) as error:
                log.error("storage.stopped", url=self._bucket.url, why=str(error))  # noqa: TRY400  (expected)
                self._waiting = self._uploading = None
                return
            except Exception as error:  # noqa: BLE001  (whatever it is, the thread must not end without a word)
                attempt += 1
                if attempt == 1:
                    why = str(error) if isinstance(error, PenstockError | OSError) else repr(error)
                    log.warning("storage.failed", step=checkpoint.step, error=why)
                self._retry_later(checkpoint, attempt)
            else:
                if attempt:
                    log.info("storage.recovered", url=self._bucket.url)
                attempt = 0
                self._uploading = None

    def _take(self) -> SavedCheckpoint | None:
        """Wait for a checkpoint; None when the uploader is closed and none is left, or its time is over."""
        with self._changed:
            while self._waiting is None and self._closing_at is None:
                self._changed.wait()
            if self._closing_at is not None and time.monotonic() > self._closing_at:
                return None
            self._uploading, self._waiting = self._waiting, None
            return self._uploading

    def _retry_later(self, checkpoint: SavedCheckpoint, attempt: int) -> None:
        """Wait, unless a newer checkpoint comes; then take the newer one."""
        with self._changed:
            delay_s = self._backoff.delay_s(attempt)
            if self._closing_at is not None:
                delay_s = min(delay_s, max(0.0, self._closing_at - time.monotonic()) + 0.01)
            self._changed.wait_for(lambda: self._waiting is not None, delay_s)
            self._waiting = self._waiting or checkpoint

    def _upload(self, checkpoint: SavedCheckpoint) -> None:
        began = time.monotonic()
        if self._stored is None:
            self._stored = self._read_stored()
        self._present = self._bucket.list_sizes(OBJECTS)
        files = dict[str, tuple[Part, ...]]()
        for name, path, end in self._list_files(checkpoint):
            if (parts := self._upload_file(name, path, end)) is not None:
                files[name] = self._stored[name] = parts  # another attempt does not upload it again
        snapshot = Snapshot(
            run=self._run,
            run_id=self._run_id,
            step=checkpoint.step,
            fencing_token=self._folder_lock.token,
            ledger_bytes=checkpoint.ledger_bytes,
            files=files,
            saved_at=time.time(),
        )
        with self._folder_lock.hold():  # raises if another trainer has taken over
            pass
        snapshots = self._list_snapshots()
        key = snapshot_key(snapshot)
        self._bucket.put(key, snapshot.encode())
        self._stored = files
        sizes = [part.size for parts in files.values() for part in parts if part.key not in self._present]
        seconds = round(time.monotonic() - began, 3)
        log.info("storage.saved", step=checkpoint.step, bytes=sum(sizes), objects=len(sizes), seconds=seconds)
        self._clean_up([*snapshots, key])

    def _read_stored(self) -> dict[str, tuple[Part, ...]]:
        """Return the files of the newest snapshot that can be read; nothing if all are damaged: a new one is whole.

        Raises:
            RunMismatchError: storage holds another run.
            FencedError: there is a snapshot of a later trainer.
        """
        newest = next(intact_snapshots(self._bucket, self._list_snapshots()), None)
        if newest is not None and newest.run_id != self._run_id:
            raise self._mismatch(newest.run_id[:8])
        return {} if newest is None else newest.files

    def _list_snapshots(self) -> list[str]:
        """Return the keys of all snapshots, oldest first.

        Raises:
            RunMismatchError: one is of another run.
            FencedError: one is of a later trainer.
        """
        keys = list_snapshots(self._bucket)
        for key in keys:
            if not belongs_to(key, self._run_id):
                raise self._mismatch(key.removesuffix(".json").rpartition("-")[2])
        if max(map(token_of, keys), default=0) > self._folder_lock.token:
            raise FencedError(f"{self._bucket.url} has a snapshot of a later trainer; this one copies nothing")
        return keys

    def _mismatch(self, found: str) -> RunMismatchError:
        return RunMismatchError(
            f"{self._bucket.url} holds another run named {self._run!r}, {found}, and this one is {self._run_id[:8]}: "
            f"nothing is copied; set another storage.url, or give this run another run.name"
        )

    def _list_files(self, checkpoint: SavedCheckpoint) -> Iterator[tuple[str, Path, int | None]]:
        """Yield name, path and length of every file; the archive first: it has the groups of the ledger's part."""
        for folder in _FOLDERS:
            for path in sorted((self._folder / folder).glob("[!.]*")):
                yield f"{folder}/{path.name}", path, None
        for path in sorted(checkpoint.folder.rglob("*")):
            if path.is_file():
                yield str(path.relative_to(self._folder)), path, None
        for name in _FILES:
            if name not in self._excluded:
                yield name, self._folder / name, None
        yield "metrics.jsonl", self._folder / "metrics.jsonl", checkpoint.metrics_bytes
        yield "ledger.jsonl", self._folder / "ledger.jsonl", checkpoint.ledger_bytes

    def _upload_file(self, name: str, path: Path, end: int | None) -> tuple[Part, ...] | None:
        """Upload what storage lacks of a file, and return its parts; None if the file is gone, as old archives are.

        Args:
            name: path relative to the run's folder.
            path: of the file.
            end: bytes to upload; None: all.
        """
        try:
            file = path.open("rb")
        except FileNotFoundError:
            if end or name.startswith("checkpoints/"):
                raise
            return None
        with file:
            stat = path.stat()
            end = stat.st_size if end is None else end
            seen = self._seen.get(name)
            is_known = seen is not None and (path.suffix in _APPENDED or seen == (stat.st_size, stat.st_mtime_ns))
            kept, offset = list[Part](), 0
            for part in (self._stored or {}).get(name, ()):
                if offset + part.size > end or self._present.get(part.key) != part.size:
                    break
                if not is_known and hash_bytes(_read(file, offset, part.size)) != part.blake2b:
                    break
                kept.append(part)
                offset += part.size
            while kept and offset < end and kept[-1].size <= end - offset <= PART_BYTES - kept[-1].size:
                offset -= kept.pop().size
            while offset < end:
                content = _read(file, offset, min(PART_BYTES, end - offset))
                if not content:
                    raise StorageError(f"{path} has {offset} bytes, and the checkpoint was made when it had {end}")
                kept.append(self._put(content))
                offset += len(content)
        self._seen[name] = (stat.st_size, stat.st_mtime_ns)
        return tuple(kept)

    def _put(self, content: bytes) -> Part:
        key = object_key(self._folder_lock.token, self._run_id, secrets.token_hex(16))
        self._bucket.put(key, content)
        return Part(key=key, size=len(content), blake2b=hash_bytes(content))

    def _clean_up(self, snapshots: Sequence[str]) -> None:
        """Delete all snapshots but the newest intact ones, and this run's objects that those do not need."""
        kept = dict[str, set[str]]()
        for key in reversed(snapshots):
            if len(kept) < _KEPT_SNAPSHOTS:
                with suppress(DamagedObjectError):
                    kept[key] = read_snapshot(self._bucket, key).keys
        self._bucket.delete([key for key in snapshots if key not in kept])
        needed = set[str]().union(*kept.values())
        for key in sorted(self._present.keys() - needed):
            if belongs_to(key, self._run_id) and token_of(key) <= self._folder_lock.token:
                self._bucket.delete([key])


def _read(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(size)
