"""The archive: groups that met an end at the trainer, byte for byte as it leased them, on disk in the run's folder.

::

    groups/
    ├── 000001.groups     append-only segments: each life of a trainer begins a new one, and another when one is full;
    └── 000002.groups     no two processes ever write to the same

    a record         b"PSgr", crc32 of what follows up to the payload, size of the line, size of the payload (each 4
                     bytes, little-endian); the ledger's line (JSON); the payload (`stream.codec`)

A segment is read by its records' heads alone; a payload has a checksum of its own (`stream.codec`). What is no record,
or was torn when its trainer died, is passed by. The ledger says which of these groups count: those of steps that were
lost with their trainer are here too, and a group that came again is here twice.
"""

import io
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from stream.codec import decode
from stream.durable import fsync_path, write_all
from stream.errors import PenstockError, RecordError, RunFailedError
from stream.records import Group
from stream.trainer.folder_lock import RunFolderLock, hold_optional
from stream.trainer.ledger import LedgerRecord, content_hash, decode_record, encode_record

_MAGIC = b"PSgr"
_HEAD = struct.Struct("<4sIII")
_SIZES = struct.Struct("<II")
_SUFFIX = ".groups"
_SEGMENT_BYTES = 64_000_000
_MIN_SEGMENTS = 8
"""A bounded archive has at least so many, so that not much goes at once."""


class Archive:
    """Where the trainer puts groups. For it alone; others read `ArchivedGroups`.

    Args:
        folder: of the segments; made with the first group.
        max_bytes: bytes to keep at most: beyond it the oldest segments go, but never the one that is written; None:
        all. folder_lock: the trainer's right to write here, where another one may come.
    """

    def __init__(self, folder: Path, max_bytes: int | None = None, folder_lock: RunFolderLock | None = None) -> None:
        self.folder = folder
        self._max_bytes = max_bytes
        self._folder_lock = folder_lock
        self._segment_bytes = min(_SEGMENT_BYTES, (max_bytes or _SEGMENT_BYTES * _MIN_SEGMENTS) // _MIN_SEGMENTS)
        self._sizes = {path: path.stat().st_size for path in _segments(folder)}
        self._path = folder / f"{0:06d}{_SUFFIX}"
        self._file: io.FileIO | None = None

    def write(self, groups: Iterable[tuple[LedgerRecord, bytes]]) -> None:
        """Write groups, each with its ledger line and the payload that it came in; durable only after `sync`.

        Raises:
            RunFailedError: the disk is full, or refuses. What was written of the last group will be passed by.
        """
        with hold_optional(self._folder_lock):
            try:
                for line, payload in groups:
                    self._write(line, payload)
            except OSError as error:
                raise self._write_error(error) from error

    def sync(self) -> None:
        """Make everything written durable; call it before the ledger's lines of these groups are.

        Raises:
            RunFailedError: the disk refuses.
        """
        try:
            if self._file is not None:
                os.fsync(self._file.fileno())
                fsync_path(self.folder)
        except OSError as error:
            raise self._write_error(error) from error

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: LedgerRecord, payload: bytes) -> None:
        told = encode_record(line)
        sizes = _SIZES.pack(len(told), len(payload))
        head = _MAGIC + zlib.crc32(told, zlib.crc32(sizes)).to_bytes(4, "little") + sizes + told
        size = len(head) + len(payload)
        if self._file is None or self._sizes[self._path] + size > self._segment_bytes:
            self._file = self._open_segment()
            self._remove_oldest(max(size, self._segment_bytes))
        write_all(self._file, head)
        write_all(self._file, payload)
        self._sizes[self._path] += size

    def _open_segment(self) -> io.FileIO:
        """A new segment; the one before is durable when it is left."""
        self.sync()
        self.close()
        self.folder.mkdir(parents=True, exist_ok=True)
        number = max(map(_segment_number, _segments(self.folder)), default=0)
        while True:
            number += 1
            self._path = self.folder / f"{number:06d}{_SUFFIX}"
            try:
                file = self._path.open("xb", buffering=0)
            except FileExistsError:  # of a trainer that does not know yet that it was succeeded, or of our successor
                continue
            self._sizes[self._path] = 0
            return file

    def _remove_oldest(self, size: int) -> None:
        """Remove the oldest segments, so that the new one may grow to this size."""
        if self._max_bytes is None:
            return
        for path in sorted(self._sizes.keys() - {self._path}, key=_segment_number):
            if sum(self._sizes.values()) + size <= self._max_bytes:
                break
            path.unlink(missing_ok=True)
            del self._sizes[path]

    def _write_error(self, error: OSError) -> RunFailedError:
        return RunFailedError(
            f"a group could not be archived in {self._path}: {error}. Make room on that disk, or keep less "
            "(archive.keep), and run again: the run resumes from its last checkpoint"
        )


class ArchiveOffset(Struct, frozen=True):
    """Where one archived group lies."""

    file: Path
    offset: int
    size: int
    """Of the payload, in bytes."""

    def read_payload(self) -> bytes:
        """Its bytes.

        Raises:
            PenstockError: the segment is gone: the run goes on, and its archive is bounded.
        """
        try:
            with self.file.open("rb") as file:
                file.seek(self.offset)
                return file.read(self.size)
        except FileNotFoundError as error:
            raise PenstockError(f"{self.file} was removed while it was read (archive.keep)") from error


class ArchivedGroups:
    """The groups that lie in an archive, by prompt id and content hash (`stream.trainer.ledger.content_hash`).

    Looking them up reads no payload; nothing is changed.

    Args:
        folder: of the segments; need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._offsets = {(line.prompt, line.hash): place for line, place in scan_archive(folder)}

    def __len__(self) -> int:
        return len(self._offsets)

    def __contains__(self, key: tuple[str, str]) -> bool:
        return key in self._offsets

    def read(self, prompt: str, content: str) -> Group:
        """The group of this prompt and content.

        Raises:
            KeyError: it is not there.
            RecordError: what is there is no group any more, or another one; names the file and the place.
            PenstockError: its segment was removed meanwhile.
        """
        place = self._offsets[prompt, content]
        try:
            group = decode(place.read_payload(), Group)
        except RecordError as error:
            raise RecordError(f"{place.file}, byte {place.offset}: the group of prompt {prompt}: {error}") from error
        if (group.prompt.id, content_hash(group)) != (prompt, content):
            raise RecordError(
                f"{place.file}, byte {place.offset}: not the group of prompt {prompt} with hash {content}"
            )
        return group


def scan_archive(folder: Path) -> Iterator[tuple[LedgerRecord, ArchiveOffset]]:
    """Every whole record in an archive, oldest first: the ledger line as it was written then, and where its group is.

    A line that the ledger does not have any more is one of a step that was lost with its trainer.
    """
    for path in _segments(folder):
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < _HEAD.size:
                    continue
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    yield from ((record, ArchiveOffset(path, offset, size)) for record, offset, size in _scan(data))
        except FileNotFoundError:  # removed meanwhile
            continue


def _scan(data: mmap.mmap) -> Iterator[tuple[LedgerRecord, int, int]]:
    """Line, and place and size of the payload, of each record; what is none is passed by, up to the next one."""
    at = data.find(_MAGIC)
    while 0 <= at <= len(data) - _HEAD.size:
        _, checksum, told, size = _HEAD.unpack_from(data, at)
        begins = at + _HEAD.size
        payload, line = begins + told, None
        if payload + size <= len(data):
            text = data[begins:payload]
            if zlib.crc32(text, zlib.crc32(_SIZES.pack(told, size))) == checksum:
                line = _decode_record(text)
        if line is None:
            at = data.find(_MAGIC, at + 1)
            continue
        yield line, payload, size
        at = data.find(_MAGIC, payload + size)


def _decode_record(text: bytes) -> LedgerRecord | None:
    try:
        return decode_record(text)
    except ValueError:
        return None


def _segments(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted((path for path in folder.glob(f"*{_SUFFIX}") if path.stem.isdecimal()), key=_segment_number)


def _segment_number(path: Path) -> int:
    return int(path.stem)
