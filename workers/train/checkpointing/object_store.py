"""A copy of the run in object storage (`[storage]`): S3, Google Cloud Storage, Azure, or a folder.

::

    trainer: checkpoint saved ─► thread: pieces that storage lacks ─► the pointer ─► delete pieces that it does not name
    penstock run, penstock train: folder lost ─► the pointer ─► its pieces, each verified ─► folder

    URL/RUN/latest.json         the pointer: the pieces of every file of the run, as of one checkpoint
    URL/RUN/objects/ID/HASH     a piece of a file, named for its content; ID is the beginning of the run's id

A piece is never changed, and the pointer is written last. So at every moment storage holds one complete state.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final, TypeVar

import msgspec
import structlog
from msgspec import Struct

from stream.connection.address import has_secret
from stream.connection.run_identity import IDENTITY_FILE, RunIdentity, read_identity
from stream.durable import fsync_path, remove_folder, write_file_atomically
from stream.errors import FencedError, RunMismatchError, SettingsError, StorageError
from stream.trainer.folder_lock import LOCK_FILE, RunFolderLock
from stream.waiting import Backoff
from workers.runs.warnings import TrainingWarning, write_warnings
from workers.settings import Settings

T = TypeVar("T")

log = structlog.get_logger()

STAGING: Final = ".restoring"
"""Folder in the run's folder while the run is restored; if a start finds it, it restores the run again."""
RESTORED: Final = "restored.json"
"""File in the run's folder from a restoration until a trainer has resumed from it."""
POINTER: Final = "latest.json"
_PIECE_BYTES: Final = 64_000_000
"""Size of a piece; the last piece of a file may be smaller."""
_REQUEST: Final[Any] = {"timeout": "120s", "connect_timeout": "10s"}
_RETRIES: Final[Any] = {"max_retries": 3, "retry_timeout": timedelta(seconds=30)}
_ATTEMPTS, _BACKOFF = 10, Backoff(1.0, 60.0)
"""Attempts to copy a checkpoint, and the waits between them; each request of an attempt has retries of its own."""
_CLOSE_TIMEOUT_S: Final = 600.0
"""Longest time for which a trainer that ends waits for its last copy."""
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
"""Environment variables with the address of an S3-compatible server."""
_FOLDERS: Final = ("groups", "trained_tokens", "rows")
_FILES: Final = (IDENTITY_FILE, LOCK_FILE, "run.toml", "eval.jsonl")
_LEDGER, _CHECKPOINTS = "ledger.jsonl", "checkpoints/"


class Piece(Struct, frozen=True):
    """A piece of a file: an object in storage."""

    key: str
    size: int
    """Bytes."""


class Copy(Struct, frozen=True, kw_only=True):
    """A copy of a run: the content of the pointer."""

    run_id: str
    step: int
    fencing_token: int
    """The token of the trainer that wrote the pointer; a later trainer has a larger one."""
    files: dict[str, tuple[Piece, ...]]
    """The pieces of each file, by its path relative to the run's folder."""


class SavedCheckpoint(Struct, frozen=True):
    """A checkpoint in the run's folder, and the bytes that the ledger and the metrics had when it was saved."""

    folder: Path
    step: int
    ledger_bytes: int
    metrics_bytes: int


class Bucket:
    """The objects of a run in storage. Every call blocks; credentials come from the environment.

    Raises:
        SettingsError: `storage.url` is invalid, or the extra `storage` is not installed.
    """

    def __init__(self, settings: Settings) -> None:
        base_url = settings.storage.url
        self.url = f"{base_url.rstrip('/')}/{settings.run.name}"
        try:
            import obstore
            from obstore.store import LocalStore, from_url
        except ImportError as error:
            raise SettingsError(
                "storage.url needs the library obstore, which is not installed: pip install 'penstock[storage]'"
            ) from error
        is_unencrypted = next(filter(None, map(os.environ.get, _ENDPOINTS)), "").startswith("http://")
        client = _REQUEST | {"allow_http": True} if is_unencrypted else _REQUEST
        self._obstore = obstore
        try:
            self._store = (
                LocalStore.from_url(self.url, mkdir=True)
                if base_url.startswith("file://")
                else from_url(self.url, client_options=client, retry_config=_RETRIES)
            )
        except Exception as error:  # the library raises several kinds
            raise SettingsError(f"storage.url = {base_url!r}: {error}") from error

    def put(self, key: str, content: bytes) -> None:
        """Write an object."""
        self._call("write", key, lambda: self._obstore.put(self._store, key, content))

    def get(self, key: str) -> bytes | None:
        """Read an object; None if there is none."""
        return self._call("read", key, lambda: bytes(self._obstore.get(self._store, key).bytes()))

    def list_sizes(self, prefix: str) -> dict[str, int]:
        """Return the size in bytes of each object below a prefix, by key."""
        pages = self._call("list", prefix, lambda: list(self._obstore.list(self._store, prefix)))
        return {each["path"]: each["size"] for page in pages or () for each in page}

    def delete(self, key: str) -> None:
        """Delete an object, if there is one."""
        self._call("delete", key, lambda: self._obstore.delete(self._store, key))

    def read_pointer(self) -> Copy | None:
        """Return the content of the pointer; None if storage has no copy of the run.

        Raises:
            StorageError: storage does not answer, or the pointer is damaged.
        """
        if (content := self.get(POINTER)) is None:
            return None
        try:
            return msgspec.json.decode(content, type=Copy)
        except (ValueError, RecursionError) as error:
            raise StorageError(
                f"{self.url}/{POINTER} is damaged ({error}). Replace it with an earlier version of it, or remove it: "
                "then a trainer that has the run's folder makes a new copy, and one without the folder begins a new run"
            ) from error

    def _call(self, verb: str, key: str, call: Callable[[], T]) -> T | None:
        """Call the library, and return its result; None if the object does not exist.

        Raises:
            StorageError: storage does not answer, or refuses the request.
        """
        try:
            return call()
        except FileNotFoundError:
            return None
        except Exception as error:  # the library's errors have no useful common base class
            raise StorageError(
                f"{self.url}: could not {verb} {key}: {' '.join(str(error).split())[:500]}; check storage.url, the "
                "network, and the credentials in the environment (for S3 AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, "
                "AWS_ENDPOINT_URL)"
            ) from error


class Uploader:
    """Copies checkpoints to storage in a thread of its own, until it is closed.

    Only the newest checkpoint waits: a request replaces one whose copying has not begun.
    """

    def __init__(self, bucket: Bucket, settings: Settings, folder_lock: RunFolderLock) -> None:
        self._bucket, self._folder, self._folder_lock = bucket, settings.folder, folder_lock
        self._run_id = (read_identity(settings.folder) or RunIdentity()).id
        self._prefix = f"objects/{self._run_id[:8]}/"
        self._excluded = {"run.toml"} if has_secret(settings.run.redis) else set[str]()
        self._newest: SavedCheckpoint | None = None
        self._uploading: SavedCheckpoint | None = None
        self._settled: SavedCheckpoint | None = None
        """The last checkpoint that was copied, or whose attempts are used up."""
        self._pieces: dict[tuple[str, int, int], tuple[Piece, ...]] = {}
        """Pieces of files by name, length and modification time, so that an unchanged file is not read again."""
        self._is_closing, self._changed = False, Event()
        self._thread = Thread(target=self._work, name="storage", daemon=True)
        self._thread.start()

    @property
    def in_use(self) -> set[Path]:
        """Folders of checkpoints that must not be removed yet."""
        waiting = (self._newest, self._uploading) if self._thread.is_alive() else ()
        return {each.folder for each in waiting if each is not None and each is not self._settled}

    def request(self, checkpoint: SavedCheckpoint) -> None:
        """Have a checkpoint copied by the thread; returns immediately."""
        self._newest = checkpoint
        self._changed.set()

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Wait until the last checkpoint is in storage, and end the thread. Blocks."""
        self._is_closing = True
        self._changed.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive() and self._newest is not None:
            self._warn(self._newest, "the trainer has ended, and its next start copies it")

    def _work(self) -> None:
        attempt = 0
        while True:
            self._changed.wait(_BACKOFF.delay_s(attempt) if attempt else None)
            self._changed.clear()
            if (checkpoint := self._newest) is None or checkpoint is self._settled:
                if self._is_closing:
                    return
                continue
            self._uploading = checkpoint
            try:
                self._upload(checkpoint)
            except (FencedError, RunMismatchError) as error:
                log.error("storage.stopped", url=self._bucket.url, why=str(error))  # noqa: TRY400  (expected)
                return
            except Exception as error:  # noqa: BLE001  (whatever it is, the thread must not end silently)
                log.warning("storage.failed", step=checkpoint.step, error=str(error) or repr(error))
                if (attempt := attempt + 1) < _ATTEMPTS:
                    continue
                self._warn(checkpoint, f"{error}. The next checkpoint is tried again")
            attempt, self._settled = 0, checkpoint
            self._changed.set()  # look again: a request or `close` may have set the event just before it was cleared

    def _warn(self, checkpoint: SavedCheckpoint, why: str) -> None:
        """Have `penstock run` print that a checkpoint is not in storage."""
        text = f"the checkpoint of step {checkpoint.step} is not in {self._bucket.url}: {why}"
        warning = TrainingWarning(name="storage", text=text, step=checkpoint.step, time=time.time())
        write_warnings(self._folder, [warning])

    def _upload(self, checkpoint: SavedCheckpoint) -> None:
        began = time.monotonic()
        self._refuse_other_writer()
        before = self._bucket.list_sizes(self._prefix)
        present, files = dict(before), {}
        for name, end in self._list_files(checkpoint):
            if (pieces := self._upload_file(name, end, present)) is not None:
                files[name] = pieces
        with self._folder_lock.hold():  # raises if another trainer has taken over
            pass
        self._refuse_other_writer()
        copy = Copy(run_id=self._run_id, step=checkpoint.step, fencing_token=self._folder_lock.token, files=files)
        self._bucket.put(POINTER, msgspec.json.encode(copy))
        sent = [size for key, size in present.items() if key not in before]
        seconds = round(time.monotonic() - began, 3)
        log.info("storage.saved", step=checkpoint.step, bytes=sum(sent), objects=len(sent), seconds=seconds)
        for key in present.keys() - {piece.key for pieces in files.values() for piece in pieces}:
            self._bucket.delete(key)

    def _refuse_other_writer(self) -> None:
        copy = self._bucket.read_pointer()
        if copy is not None and copy.run_id != self._run_id:
            raise RunMismatchError(
                f"{self._bucket.url} holds another run of this name, {copy.run_id[:8]}, and this one is "
                f"{self._run_id[:8]}: nothing is copied; set another storage.url, or give this run another run.name"
            )
        if copy is not None and copy.fencing_token > self._folder_lock.token:
            raise FencedError(f"{self._bucket.url} has the copy of a later trainer; this one copies nothing")

    def _list_files(self, checkpoint: SavedCheckpoint) -> Iterator[tuple[str, int | None]]:
        """Yield the name of each file, and its length as of the checkpoint; None: all of it.

        The archive comes first. It already has every group that this part of the ledger names.
        """
        for folder in _FOLDERS:
            yield from ((f"{folder}/{path.name}", None) for path in sorted((self._folder / folder).glob("[!.]*")))
        for path in sorted(checkpoint.folder.rglob("*")):
            if path.is_file():
                yield str(path.relative_to(self._folder)), None
        yield from ((name, None) for name in _FILES if name not in self._excluded)
        yield "metrics.jsonl", checkpoint.metrics_bytes
        yield _LEDGER, checkpoint.ledger_bytes

    def _upload_file(self, name: str, end: int | None, present: dict[str, int]) -> tuple[Piece, ...] | None:
        """Upload what storage lacks of a file; return its pieces, or None if the file is gone, as old archives are."""
        path, pieces = self._folder / name, list[Piece]()
        if not path.exists() and not end and not name.startswith(_CHECKPOINTS):
            return None
        stat = path.stat()
        length = stat.st_size if end is None else end
        seen = self._pieces.get(file_key := (name, length, stat.st_mtime_ns), ())
        if seen and all(present.get(piece.key) == piece.size for piece in seen):
            return seen
        with path.open("rb") as file:
            for start in range(0, length, _PIECE_BYTES):
                content = file.read(min(_PIECE_BYTES, length - start))
                piece = Piece(key=self._prefix + _hash(content), size=len(content))
                if present.get(piece.key) != piece.size:
                    self._bucket.put(piece.key, content)
                    present[piece.key] = piece.size
                pieces.append(piece)
        if sum(piece.size for piece in pieces) != length:
            raise StorageError(f"{path} is shorter than the {length} bytes that it had at the checkpoint")
        self._pieces[file_key] = tuple(pieces)
        return tuple(pieces)


def find_copy(settings: Settings) -> Copy | None:
    """Return the copy from which a run has to be restored; None if its folder has it, or storage has none. Blocks.

    Raises:
        StorageError: storage does not answer, so a lost run looks like a new one; or the folder was restored in part,
            and the rest is not in storage.
        RunMismatchError: storage holds another run of this name.
    """
    folder, is_incomplete = settings.folder, False
    if os.path.isdir(folder):  # noqa: PTH112  (`Path.is_dir` raises where a parent is not ours to read)
        ledger, is_incomplete = folder / _LEDGER, (folder / STAGING).exists()
        has_run = (ledger.exists() and ledger.stat().st_size > 0) or any((folder / _CHECKPOINTS).glob("step-*"))
        if has_run and not is_incomplete:
            return None
    copy = Bucket(settings).read_pointer() if settings.storage.url else None
    if copy is None and is_incomplete:
        raise StorageError(
            f"{folder} was restored only in part, and storage.url = {settings.storage.url!r} has no copy of the run. "
            "Set storage.url to what it was, and start again; or remove the folder to begin the run from step 0"
        )
    identity = read_identity(folder) if copy is not None else None
    if copy is not None and identity is not None and identity.id != copy.run_id:
        raise RunMismatchError(
            f"{folder} belongs to run {identity.id[:8]}, and {settings.storage.url} holds run {copy.run_id[:8]} of the "
            "same name: give this run another run.name, or set another storage.url"
        )
    return copy


def restore(copy: Copy, settings: Settings) -> str:
    """Write all files of a copy to the run's folder, which the caller has locked. Blocks. Returns the URL of the copy.

    Each piece is verified. The checkpoint is moved to its place last: until then, each start restores the run again.

    Raises:
        StorageError: storage does not answer, a piece is missing or was altered, or the disk is full.
    """
    bucket, folder, staging = Bucket(settings), settings.folder, settings.folder / STAGING
    try:
        for name, pieces in copy.files.items():
            _download(bucket, pieces, staging / name)
        for checkpoint in (folder / _CHECKPOINTS).glob("step-*"):  # left by an interrupted restoration of another copy
            remove_folder(checkpoint)
        for name in sorted(copy.files, key=lambda name: (name.startswith(_CHECKPOINTS), name == _LEDGER)):
            if not name.startswith(_CHECKPOINTS):
                _move(staging / name, folder / name)
        write_file_atomically(folder / RESTORED, msgspec.json.encode({"url": bucket.url, "step": copy.step}) + b"\n")
        for checkpoint in (staging / _CHECKPOINTS).glob("step-*"):
            _move(checkpoint, folder / _CHECKPOINTS / checkpoint.name)
        shutil.rmtree(staging)
    except OSError as error:
        raise StorageError(
            f"{folder} could not be restored from {bucket.url}: {error}; make room on that disk, and start again"
        ) from error
    return bucket.url


def _download(bucket: Bucket, pieces: tuple[Piece, ...], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        for piece in pieces:
            content = bucket.get(piece.key)
            if content is None or _hash(content) != piece.key.rpartition("/")[2]:
                what = "is missing" if content is None else "was altered: it is not what the trainer uploaded"
                raise StorageError(
                    f"{bucket.url}/{piece.key} {what}. Start again if a trainer still writes there; else put the "
                    "object back, or give the run another run.name to begin from step 0"
                )
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fsync_path(target.parent)


def _move(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    source.rename(target)
    fsync_path(target.parent)


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
