"""A snapshot: every file of a run as of one checkpoint, as a list of objects in storage.

::

    URL/RUN/snapshots/TOKEN-STEP-TIME-ID.json   newest last: by the trainer's fencing token, then by step
    URL/RUN/objects/TOKEN-ID/PIECE              a piece of a file, at most 64 MB; never changed

ID is the beginning of the run's id, so two runs of one name neither delete each other's objects nor go unnoticed.
Objects with other names are not Penstock's, and are left alone.
"""

import hashlib
import re
import time
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import structlog
from msgspec import Struct
from msgspec.structs import replace

from stream.errors import DamagedObjectError
from workers.storage.bucket import Bucket

SNAPSHOTS: Final = "snapshots"
OBJECTS: Final = "objects"
_FORMAT: Final = 1
_ID_LENGTH: Final = 8
_SNAPSHOT_KEY: Final = re.compile(rf"{SNAPSHOTS}/(?P<token>\d+)-\d+-\d+(-(?P<run>\w*))?\.json")
_OBJECT_KEY: Final = re.compile(rf"{OBJECTS}/(?P<token>\d+)(-(?P<run>\w*))?/[0-9a-f]{{32}}")

log = structlog.get_logger()


class Part(Struct, frozen=True):
    """A piece of a file."""

    key: str
    size: int
    blake2b: str


class Snapshot(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of a snapshot object."""

    format: int = _FORMAT
    run: str
    run_id: str
    step: int
    fencing_token: int
    """Of the trainer that wrote it; a later trainer has a larger one."""
    ledger_bytes: int
    files: dict[str, tuple[Part, ...]]
    """The parts of each file, in order, by path relative to the run's folder."""
    saved_at: float
    """Unix time."""
    digest: str = ""
    """Of all other fields."""

    @property
    def keys(self) -> set[str]:
        """The keys of all objects."""
        return {part.key for parts in self.files.values() for part in parts}

    def encode(self) -> bytes:
        """Return the object's content."""
        blank = replace(self, digest="")
        return msgspec.json.encode(replace(blank, digest=hash_bytes(msgspec.json.encode(blank))))


def hash_bytes(content: bytes) -> str:
    """Return the hash by which a part is verified."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def snapshot_key(snapshot: Snapshot) -> str:
    """Return the key of a snapshot's object."""
    now = time.time_ns() // 1_000_000
    token, step, run = snapshot.fencing_token, snapshot.step, snapshot.run_id[:_ID_LENGTH]
    return f"{SNAPSHOTS}/{token:08d}-{step:08d}-{now:013d}-{run}.json"


def object_key(token: int, run_id: str, piece: str) -> str:
    """Return the key of a piece of a file."""
    return f"{OBJECTS}/{token:08d}-{run_id[:_ID_LENGTH]}/{piece}"


def token_of(key: str) -> int:
    """Return the fencing token in the key of a snapshot or of an object; 0 if it is not Penstock's."""
    found = _SNAPSHOT_KEY.fullmatch(key) or _OBJECT_KEY.fullmatch(key)
    return int(found["token"]) if found else 0


def belongs_to(key: str, run_id: str) -> bool:
    """Return whether an object is of this run; the keys of earlier releases name no run, and are taken for this one."""
    found = _SNAPSHOT_KEY.fullmatch(key) or _OBJECT_KEY.fullmatch(key)
    return found is not None and found["run"] in (None, "", run_id[:_ID_LENGTH])


def list_snapshots(bucket: Bucket) -> list[str]:
    """Return the keys of all snapshots, oldest first."""
    return [key for key in bucket.list_sizes(SNAPSHOTS) if _SNAPSHOT_KEY.fullmatch(key)]


def read_snapshot(bucket: Bucket, key: str) -> Snapshot:
    """Read a snapshot.

    Raises:
        DamagedObjectError: the object is missing, or was altered.
        StorageError: storage does not answer.
    """
    try:
        found = msgspec.json.decode(bucket.get(key), type=Snapshot)
    except (ValueError, RecursionError) as error:
        raise DamagedObjectError(f"{bucket.url}/{key} is no snapshot of a run: {error}") from error
    if found.digest != hash_bytes(msgspec.json.encode(replace(found, digest=""))):
        raise DamagedObjectError(f"{bucket.url}/{key} was altered")
    return found


def intact_snapshots(bucket: Bucket, keys: Sequence[str]) -> Iterator[Snapshot]:
    """Yield the snapshots that can be read, newest first; logs those that cannot.

    Raises:
        StorageError: storage does not answer.
    """
    for key in reversed(keys):
        try:
            snapshot = read_snapshot(bucket, key)
        except DamagedObjectError as error:
            log.warning("storage.snapshot_skipped", url=bucket.url, why=str(error))
        else:
            yield snapshot


def newest_snapshot(bucket: Bucket) -> Snapshot | None:
    """Return the newest snapshot that can be read; None if there is none.

    Raises:
        DamagedObjectError: there are snapshots, and none can be read.
        StorageError: storage does not answer.
    """
    keys = list_snapshots(bucket)
    newest = next(intact_snapshots(bucket, keys), None)
    if newest is None and keys:
        raise DamagedObjectError(
            f"{bucket.url}: none of {len(keys)} snapshots can be read, the newest is {keys[-1]}; for a new run choose "
            "another run.name"
        )
    return newest
