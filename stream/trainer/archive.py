"""The archive: groups that ended at the trainer, in the run's folder, each with the bytes that the trainer was given.

::

    groups/
    ├── 000001.groups     append-only segments: a new one begins when a trainer starts and when the last one is full, so
    └── 000002.groups     no two processes write to the same segment

    a record         b"PSgr", crc32 of everything up to the payload, size of the record, size of the payload (each 4
                     bytes, little-endian); the ledger record (JSON), with a key `completions` if the group was trained:
                     what the step did with each completion; the payload (`stream.codec`)

Readers scan the records' headers; a payload has its own checksum. Anything that is not a record, or
was incomplete when its trainer died, is skipped. The ledger decides which groups count: the archive also has groups
of steps that were lost with their trainer, and a group that was delivered again is in it twice.
"""

import io
import mmap
import os
import struct
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock

import msgspec
from msgspec import Struct

from stream.codec import decode
from stream.disk_space import persist
from stream.durable import append_all, fsync_path
from stream.errors import PenstockError, RecordError, RunFailedError
from stream.records import Group, TrainedCompletion
from stream.trainer.folder_lock import RunFolderLock, hold_optional
from stream.trainer.ledger_records import LedgerRecord, content_hash, decode_record, encode_record
from stream.trainer.trained_tokens import TrainedTokenFiles

_MAGIC = b"PSgr"
_HEAD = struct.Struct("<4sIII")
_SIZES = struct.Struct("<II")
_SUFFIX = ".groups"
_SEGMENT_BYTES = 64_000_000
_MIN_SEGMENTS = 8
"""A bounded archive has at least this many segments, so that removing one removes little."""


class Archive:
    """Writes groups; used by the trainer. `ArchivedGroups` reads them.

    Args:
        folder: of the segments; created with the first group.
        max_bytes: bytes to keep at most; the oldest segments are removed first, never the one being written. None: keep
            all.
        folder_lock: the trainer's lock on the run's folder; None if no other trainer can exist.
        trained_tokens: stores what a step did with each token; None: that is not stored.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int | None = None,
        folder_lock: RunFolderLock | None = None,
        trained_tokens: TrainedTokenFiles | None = None,
    ) -> None:
        self.folder = folder
        self._max_bytes = max_bytes
        self._folder_lock = folder_lock
        self._trained_tokens = trained_tokens
        self._segment_bytes = min(_SEGMENT_BYTES, (max_bytes or _SEGMENT_BYTES * _MIN_SEGMENTS) // _MIN_SEGMENTS)
        self._sizes = {path: path.stat().st_size for path in _segments(folder)}
        self._path = folder / f"{0:06d}{_SUFFIX}"
        self._file: io.FileIO | None = None

    def write(
        self,
        groups: Iterable[tuple[LedgerRecord, bytes]],
        completions: Mapping[str, Sequence[TrainedCompletion]] | None = None,
    ) -> None:
        """Write groups, each with its ledger record and the payload of its entry; durable only after `sync`.

        While the disk is full, this waits for room.

        Args:
            groups: ledger record and payload of each.
            completions: what the step did with each completion of a group, except the greedy one, by prompt id. Where
                they have rows, what it did with each token is stored.

        Raises:
            RunFailedError: the disk stays full, or fails. Readers skip an incomplete last group.
        """
        remaining, unpublished = deque(groups), None
        with_rows = {prompt: group for prompt, group in (completions or {}).items() if any(each.rows for each in group)}
        if self._trained_tokens is not None and with_rows and remaining:
            step, version = remaining[0][0].step, remaining[0][0].version
            unpublished = step, self._trained_tokens.write_unpublished(step, version, with_rows)

        def write() -> None:  # again while the disk is full, so a group that was written is taken off the queue
            with hold_optional(self._folder_lock):
                while remaining:
                    record, payload = remaining[0]
                    self._write(_encode_line(record, (completions or {}).get(record.prompt)), payload)
                    remaining.popleft()
                if unpublished is not None and self._trained_tokens is not None:
                    self._trained_tokens.publish(*unpublished)

        try:
            persist(self.folder, write)
        except OSError as error:
            raise self._write_error(error) from error

    def sync(self) -> None:
        """Make all groups durable; call it before the ledger's records of these groups are made durable.

        Raises:
            RunFailedError: the disk is full or fails.
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

    def _write(self, line: bytes, payload: bytes) -> None:
        sizes = _SIZES.pack(len(line), len(payload))
        head = _MAGIC + zlib.crc32(line, zlib.crc32(sizes)).to_bytes(4, "little") + sizes + line
        size = len(head) + len(payload)
        if self._file is None or self._sizes[self._path] + size > self._segment_bytes:
            self._file = self._open_segment()
            self._remove_oldest(max(size, self._segment_bytes))
        append_all(self._file, head, payload)
        self._sizes[self._path] += size

    def _open_segment(self) -> io.FileIO:
        """Open a new segment, after making the previous one durable."""
        self.sync()
        self.close()
        self.folder.mkdir(parents=True, exist_ok=True)
        number = max(map(_segment_number, _segments(self.folder)), default=0)
        while True:
            number += 1
            self._path = self.folder / f"{number:06d}{_SUFFIX}"
            try:
                file = self._path.open("xb", buffering=0)
            except FileExistsError:  # made by a trainer that is being replaced, or by our successor
                continue
            self._sizes[self._path] = 0
            return file

    def _remove_oldest(self, size: int) -> None:
        """Remove the oldest segments so that the new one may grow to this size, in bytes."""
        if self._max_bytes is None:
            return
        for path in sorted(self._sizes.keys() - {self._path}, key=_segment_number):
            if sum(self._sizes.values()) + size <= self._max_bytes:
                break
            path.unlink(missing_ok=True)
            del self._sizes[path]

    def _write_error(self, error: OSError) -> RunFailedError:
        return RunFailedError(
            f"a group could not be archived in {self._path}: {error}. Free space on that disk, or keep less "
            "(archive.keep), and run again: the run resumes from its last checkpoint"
        )


class ArchiveOffset(Struct, frozen=True):
    """The position of one archived group."""

    file: Path
    offset: int
    """Where the payload begins, in bytes."""
    size: int
    """Size of the payload, in bytes."""
    line_size: int = 0
    """Size of the ledger record before the payload, in bytes."""

    def read_payload(self) -> bytes:
        """Read the payload.

        Raises:
            PenstockError: the segment was removed, because the run continues and its archive is bounded.
        """
        return self._read(self.offset, self.size)

    def read_completions(self) -> list[TrainedCompletion]:
        """Read what the step did with each completion except the greedy one; empty if that was not archived.

        Raises:
            PenstockError: the segment was removed, because the run continues and its archive is bounded.
        """
        line = self._read(self.offset - self.line_size, self.line_size)
        return _completions_decoder.decode(line).completions if line else []

    def _read(self, offset: int, size: int) -> bytes:
        try:
            with self.file.open("rb") as file:
                file.seek(offset)
                return file.read(size)
        except FileNotFoundError as error:
            raise PenstockError(f"{self.file} was removed while it was read (archive.keep)") from error
        except OSError as error:
            raise PenstockError(f"{self.file} cannot be read: {error}") from error


class ArchivedGroups:
    """The groups in an archive, by prompt id and `content_hash`. Several threads may use it; it changes nothing.

    A lookup scans segments until it finds its group, and reads no payloads. No segment is scanned twice.

    Args:
        folder: of the segments; it need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = Lock()
        self._offsets: dict[tuple[str, str], ArchiveOffset] = {}
        self._ends: dict[Path, int] = {}
        """Where the last complete record of each scanned segment ends, in bytes."""
        self._unscanned: dict[Path, int | None] = {}
        """The first step in each of the other segments, newest segment first; None: not read yet."""
        self.refresh()

    def __len__(self) -> int:
        while self._unscanned:
            self._scan_next(None)
        return len(self._offsets)

    def __contains__(self, key: tuple[str, str]) -> bool:
        return self.find(*key) is not None

    def refresh(self) -> None:
        """Let lookups find what was added to the archive since the last call."""
        with self._lock:
            segments = _segments(self.folder)
            for path in filter(self._ends.__contains__, segments):
                self._index(path)
            self._unscanned = {path: self._unscanned.get(path) for path in segments[::-1] if path not in self._ends}

    def find(self, prompt: str, content: str, step: int | None = None) -> ArchiveOffset | None:
        """Return the position of the group with this prompt id and content hash; None if the archive does not have it.

        Args:
            prompt: its id.
            content: its `content_hash`.
            step: of its ledger record, if that is known: the segment that has the step is scanned first.
        """
        key = prompt, content
        while key not in self._offsets and self._unscanned:
            self._scan_next(step)
        return self._offsets.get(key)

    def read(self, prompt: str, content: str) -> Group:
        """Return the group with this prompt id and content hash.

        Raises:
            KeyError: the archive does not have it.
            RecordError: the payload is damaged, or of another group; the message has file and offset.
            PenstockError: the segment was removed meanwhile.
        """
        at = self.find(prompt, content)
        if at is None:
            raise KeyError((prompt, content))
        try:
            group = decode(at.read_payload(), Group)
        except RecordError as error:
            raise RecordError(f"{at.file}, byte {at.offset}: the group of prompt {prompt}: {error}") from error
        if (group.prompt.id, content_hash(group)) != (prompt, content):
            raise RecordError(f"{at.file}, byte {at.offset}: not the group of prompt {prompt} with hash {content}")
        return group

    def _scan_next(self, step: int | None) -> None:
        """Scan the newest segment that may have a step, or else the newest one."""
        with self._lock:
            path = next((path for path in self._unscanned if step is None or self._begins_by(path, step)), None)
            path = path or next(iter(self._unscanned), None)
            if path is not None:
                try:
                    self._index(path)
                finally:
                    del self._unscanned[path]

    def _begins_by(self, path: Path, step: int) -> bool:
        """Return whether a segment begins with this step or an earlier one; its steps ascend: one trainer wrote it."""
        first = self._unscanned[path]
        if first is None:
            first = self._unscanned[path] = next((record.step for record, _ in _scan_segment(path)), 0)
        return first <= step

    def _index(self, path: Path) -> None:
        """Add the records of a segment that were not scanned yet."""
        end = self._ends.get(path, 0)
        for record, offset in _scan_segment(path, end):
            key = record.prompt, record.hash
            earlier = self._offsets.get(key)
            if earlier is None or _segment_number(earlier.file) <= _segment_number(path):  # a repeated step: the newest
                self._offsets[key] = offset
            end = offset.offset + offset.size
        self._ends[path] = end


def scan_archive(folder: Path) -> Iterator[tuple[LedgerRecord, ArchiveOffset]]:
    """Yield every complete record, oldest first: the ledger record written with it, and the position of its group.

    If the ledger does not have that ledger record any more, its step was lost with its trainer.
    """
    for path in _segments(folder):
        yield from _scan_segment(path)


def _scan_segment(path: Path, begin: int = 0) -> Iterator[tuple[LedgerRecord, ArchiveOffset]]:
    """Yield the complete records of a segment from a position on."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < begin + _HEAD.size:
                return
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                yield from (
                    (record, ArchiveOffset(path, *position)) for record, *position in _scan_records(data, begin)
                )
    except FileNotFoundError:  # removed meanwhile
        return
    except OSError as error:
        raise PenstockError(f"{path} cannot be read: {error}") from error


def _scan_records(data: mmap.mmap, begin: int) -> Iterator[tuple[LedgerRecord, int, int, int]]:
    """Yield each ledger record with offset and size of its payload, and its own size, in bytes.

    Anything that is not a record is skipped, up to the next one.
    """
    at = data.find(_MAGIC, begin)
    while 0 <= at <= len(data) - _HEAD.size:
        _, checksum, line_size, size = _HEAD.unpack_from(data, at)
        begin = at + _HEAD.size
        payload, record = begin + line_size, None
        if payload + size <= len(data):
            line = data[begin:payload]
            if zlib.crc32(line, zlib.crc32(_SIZES.pack(line_size, size))) == checksum:
                with suppress(ValueError):
                    record = decode_record(line)
        if record is None:
            at = data.find(_MAGIC, at + 1)
            continue
        yield record, payload, size, line_size
        at = data.find(_MAGIC, payload + size)


class _Completions(Struct):
    """What a line of the archive has in addition to the ledger's."""

    completions: list[TrainedCompletion] = []


_completions_decoder = msgspec.json.Decoder(_Completions)


def _encode_line(record: LedgerRecord, completions: Sequence[TrainedCompletion] | None) -> bytes:
    line = encode_record(record)
    if not completions:
        return line
    without_rows = [msgspec.structs.replace(completion, rows=()) for completion in completions]
    return line[:-1] + b"," + msgspec.json.encode(_Completions(without_rows))[1:]  # both objects as one


def _segments(folder: Path) -> list[Path]:
    """Return the segments, oldest first."""
    return sorted((path for path in folder.glob(f"*{_SUFFIX}") if path.stem.isdecimal()), key=_segment_number)


def _segment_number(path: Path) -> int:
    return int(path.stem)
