"""Trained tokens: what the trainer decided about every sampled token, one file per step in the run's folder.

::

    trained_tokens/
    ├── 000011.trained_tokens
    └── 000012.trained_tokens   b"PStt", size of the index (4 bytes, little-endian), the index (`StepIndex`, msgpack),
                                then for each group a list of `stream.records.TrainedCompletion` (msgpack)

A file appears complete, before the ledger has its step. A step that is repeated after a crash replaces the file of the
lost one. Until then a reader is not misled: a policy version is used by one trainer only, and a file holds for a group
only if its step and version equal the ones in the group's ledger record.
"""

import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from stream.disk_space import persist
from stream.durable import write_all
from stream.errors import RunFailedError
from stream.records import TrainedCompletion
from stream.trainer.ledger_records import LedgerRecord

FOLDER: Final = "trained_tokens"
_MAGIC: Final = b"PStt"
_SIZE: Final = struct.Struct("<I")
_SUFFIX: Final = ".trained_tokens"

Completions = Mapping[str, Sequence[TrainedCompletion]]
"""The completions of a group that are not greedy, in the order of the group, by prompt id."""


class StepIndex(Struct, frozen=True):
    """Which groups a file has, and where."""

    step: int
    version: int
    """The trainer's policy version at the step."""
    groups: dict[str, tuple[int, int, int]]
    """Offset after the index in bytes, size in bytes, and crc32, by prompt id."""


class TrainedTokenFiles:
    """Writes what a step did with each token; for the trainer. Readers use `read_trained_tokens`.

    Args:
        folder: of the files; created with the first one.
        max_bytes: bytes to keep at most; the files of the oldest steps are removed first, never the newest. None: keep
            all.
    """

    def __init__(self, folder: Path, max_bytes: int | None) -> None:
        self.folder = folder
        self._max_bytes = max_bytes
        self._sizes = {path: path.stat().st_size for path in folder.glob(f"*{_SUFFIX}")}

    def write_unpublished(self, step: int, version: int, completions: Completions) -> Path:
        """Write the file of a step under a temporary name, for `publish`. While the disk is full, this waits for room.

        Raises:
            RunFailedError: the disk is full or fails.
        """
        encoder = msgspec.msgpack.Encoder()
        groups = {prompt: encoder.encode(each) for prompt, each in completions.items()}
        sizes = list(map(len, groups.values()))
        places = zip(accumulate(sizes, initial=0), sizes, map(zlib.crc32, groups.values()), strict=False)
        index = encoder.encode(StepIndex(step, version, dict(zip(groups, places, strict=True))))
        temporary = self.folder / f".{step:06d}-{version}.tmp"

        def write() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb", buffering=0) as file:
                for part in (_MAGIC + _SIZE.pack(len(index)) + index, *groups.values()):
                    write_all(file, part)

        try:
            persist(self.folder, write)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise RunFailedError(
                f"the trained tokens of step {step} could not be written to {self.folder}: {error}. Free space on that "
                "disk, or store less (archive.keep), and run again: the run resumes from its last checkpoint"
            ) from error
        return temporary

    def publish(self, step: int, temporary: Path) -> None:
        """Give a file its name, and remove files of the oldest steps; call it with the folder's lock."""
        path = self.folder / f"{step:06d}{_SUFFIX}"
        temporary.replace(path)
        self._sizes[path] = path.stat().st_size
        for leftover in self.folder.glob(".*.tmp"):
            leftover.unlink(missing_ok=True)
        total = sum(self._sizes.values())
        for oldest in sorted(self._sizes.keys() - {path}, key=_step):
            if self._max_bytes is None or total <= self._max_bytes:
                break
            oldest.unlink(missing_ok=True)
            total -= self._sizes.pop(oldest)


def read_trained_tokens(folder: Path, record: LedgerRecord) -> list[TrainedCompletion] | None:
    """Return what the step of a ledger record did with the completions of its group that are not greedy.

    Args:
        folder: of the run, which may be running.
        record: of the group.

    Returns:
        None if there is no such file: none was to be kept, it was removed to make room, or it is damaged.
    """
    try:
        with (folder / FOLDER / f"{record.step:06d}{_SUFFIX}").open("rb") as file:
            head = file.read(len(_MAGIC) + _SIZE.size)
            if len(head) < len(_MAGIC) + _SIZE.size or not head.startswith(_MAGIC):
                return None
            index = _index_decoder.decode(file.read(_SIZE.unpack_from(head, len(_MAGIC))[0]))
            if (index.step, index.version) != (record.step, record.version) or record.prompt not in index.groups:
                return None
            offset, size, checksum = index.groups[record.prompt]
            file.seek(offset, os.SEEK_CUR)
            data = file.read(size)
            return _decoder.decode(data) if zlib.crc32(data) == checksum else None
    except (OSError, OverflowError, ValueError):
        return None


_decoder = msgspec.msgpack.Decoder(list[TrainedCompletion])
_index_decoder = msgspec.msgpack.Decoder(StepIndex)


def _step(path: Path) -> int:
    return int(path.stem) if path.stem.isdecimal() else -1
