"""A snapshot: every file of a run as of one checkpoint, as a list of objects in storage.

::

    URL/RUN/snapshots/TOKEN-STEP-TIME.json   newest last: by the trainer's fencing token, then by step
    URL/RUN/objects/TOKEN/ID                 a piece of a file, at most 64 MB; never changed
"""

import hashlib
import time
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from stream.errors import StorageError
from workers.storage.bucket import Bucket

SNAPSHOTS: Final = "snapshots"
OBJECTS: Final = "objects"
_FORMAT: Final = 1


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
    return f"{SNAPSHOTS}/{snapshot.fencing_token:08d}-{snapshot.step:08d}-{time.time_ns() // 1_000_000:013d}.json"


def token_of(key: str) -> int:
    """Return the fencing token in the key of a snapshot or of an object."""
    name = key.split("/")[1]
    token = name.partition("-")[0]
    return int(token) if token.isdecimal() else 0


def read_snapshot(bucket: Bucket, key: str) -> Snapshot:
    """Read a snapshot.

    Raises:
        StorageError: storage does not answer, or the object is damaged.
    """
    try:
        found = msgspec.json.decode(bucket.get(key), type=Snapshot)
    except msgspec.DecodeError as error:
        raise StorageError(f"{bucket.url}/{key} is no snapshot of a run: {error}") from error
    if found.digest != hash_bytes(msgspec.json.encode(replace(found, digest=""))):
        raise StorageError(f"{bucket.url}/{key} was altered")
    return found


def newest_snapshot(bucket: Bucket) -> Snapshot | None:
    """Return the newest snapshot; None if there is none.

    Raises:
        StorageError: storage does not answer, or the newest snapshot is damaged.
    """
    keys = bucket.list_keys(SNAPSHOTS)
    return read_snapshot(bucket, keys[-1]) if keys else None
