"""The archive: groups that ended at the trainer, on disk in the run's folder, with the bytes in which they were leased.

::

    groups/
    ├── 000001.groups     append-only segments: each start of a trainer begins a new one, and so does a full segment; no
    └── 000002.groups     two processes write to the same segment

    a record         b"PSgr", crc32 of everything up to the payload, size of the record, size of the payload (each 4
                     bytes, little-endian); the ledger record (JSON), for a trained group with `completions`: what the
                     step did with each; the payload (`stream.codec`)

Readers scan the records' headers; a payload has its own checksum (`stream.codec`). Anything that is not a record, or
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
    """Writes groups; for the trainer. Other readers use `ArchivedGroups`.

    Args:
        folder: of the segments; created with the first group.
        max_bytes: bytes to keep at most; the oldest segments are removed first, never the one being written. None: keep
            all.
        folder_lock: the trainer's lock on the run's folder; None if no other trainer can exist.
        trained_tokens: receives what a step did with each token; None: that is not stored.
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
            completions: what the trainer did with the completions of a group that are not greedy, by prompt id. The
                tokens of those with rows are kept.

        Raises:
            RunFailedError: the disk is full or fails. An incomplete last group is skipped by readers.
        """
        ended, unpublished = deque(groups), None
        with_rows = {prompt: each for prompt, each in (completions or {}).items() if any(found.rows for found in each)}
        if self._trained_tokens is not None and with_rows and ended:
            step, version = ended[0][0].step, ended[0][0].version
            unpublished = step, self._trained_tokens.write_unpublished(step, version, with_rows)

        def write() -> None:
            with hold_optional(self._folder_lock):
                while ended:
                    record, payload = ended[0]
                    self._write(_encode_line(record, (completions or {}).get(record.prompt)), payload)
                    ended.popleft()
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
            except FileExistsError:  # of a trainer that is being replaced, or of our successor
                continue
            self._sizes[self._path] = 0
            return file

    def _remove_oldest(self, size: int) -> None:
        """Remove the oldest segments so that the new one may grow to this size."""
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
    size: int
    """Of the payload, in bytes."""
    line_size: int = 0
    """Of the ledger record before it, in bytes."""

    def read_payload(self) -> bytes:
        """Read the payload.

        Raises:
            PenstockError: the segment was removed, because the run continues and its archive is bounded.
        """
        return self._read(self.offset, self.size)

    def read_completions(self) -> list[TrainedCompletion]:
        """Read what the step did with each completion that is not greedy; empty if that was not archived.

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
    """The groups in an archive, by prompt id and `content_hash`. For threads; nothing is changed.

    A lookup scans segments until it has found its group, each segment once, and reads no payload.

    Args:
        folder: of the segments; it need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = Lock()
        self._offsets: dict[tuple[str, str], ArchiveOffset] = {}
        self._ends: dict[Path, int] = {}
        """End of the last complete record of each segment that was scanned."""
        self._unscanned: dict[Path, int | None] = {}
        """The first step in each of the other segments, the newest first; None: it was not read so far."""
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
                self._scan(path)
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
                    self._scan(path)
                finally:
                    del self._unscanned[path]

    def _begins_by(self, path: Path, step: int) -> bool:
        """Whether a segment begins with this step or an earlier one: its steps ascend, since one trainer wrote it."""
        first = self._unscanned[path]
        if first is None:
            first = self._unscanned[path] = next((record.step for record, _ in _scan_segment(path)), 0)
        return first <= step

    def _scan(self, path: Path) -> None:
        end = self._ends.get(path, 0)
        for record, offset in _scan_segment(path, end):
            key = record.prompt, record.hash
            known = self._offsets.get(key)
            if known is None or _segment_number(known.file) <= _segment_number(path):  # of a repeated step, the newest
                self._offsets[key] = offset
            end = offset.offset + offset.size
        self._ends[path] = end


def scan_archive(folder: Path) -> Iterator[tuple[LedgerRecord, ArchiveOffset]]:
    """Yield every complete record, oldest first: the ledger record written with it, and the position of its group.

    A ledger record that the ledger does not have any more is of a step that was lost with its trainer.
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
                yield from ((record, ArchiveOffset(path, *position)) for record, *position in _scan(data, begin))
    except FileNotFoundError:  # removed meanwhile
        return
    except OSError as error:
        raise PenstockError(f"{path} cannot be read: {error}") from error


def _scan(data: mmap.mmap, begin: int) -> Iterator[tuple[LedgerRecord, int, int, int]]:
    """Yield each record with offset and size of its payload, and its own size; skip all else up to the next record."""
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
    """The part of a line that the ledger does not have."""

    completions: list[TrainedCompletion] = []


_completions_decoder = msgspec.json.Decoder(_Completions)


def _encode_line(record: LedgerRecord, completions: Sequence[TrainedCompletion] | None) -> bytes:
    line = encode_record(record)
    if not completions:
        return line
    short = [msgspec.structs.replace(each, rows=()) for each in completions]
    return line[:-1] + b"," + msgspec.json.encode(_Completions(short))[1:]


def _segments(folder: Path) -> list[Path]:
    """Return the segments, oldest first."""
    return sorted((path for path in folder.glob(f"*{_SUFFIX}") if path.stem.isdecimal()), key=_segment_number)


def _segment_number(path: Path) -> int:
    return int(path.stem)
