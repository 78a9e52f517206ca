"""The ledger: one append-only file per run with a record for each group that was trained or dropped.

It outlives Redis and pruned checkpoints. A checkpoint holds the ledger's length; resuming cuts the file to that length,
so ledger and weights always contain the same groups.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from stream.durable import fsync_path, write_all
from stream.errors import RunFailedError, RunMismatchError
from stream.records import Group
from stream.trainer.folder_lock import RunFolderLock, hold_optional
from stream.trainer.outcomes import LedgerOutcome, decode_outcome, encode_outcome


class LedgerRecord(Struct, frozen=True):
    """The outcome of one group."""

    prompt: str
    outcome: LedgerOutcome
    step: int
    """The optimizer step that contained the group, or the next one if it was dropped on the way; the first is 1."""
    version: int
    """The policy version of the trainer at that time."""
    hash: str
    """Of the group's content (`content_hash`)."""


class LedgerLine(Struct, frozen=True):
    """A record and its position in the file."""

    number: int
    """The first is 1."""
    end_offset: int
    """Length of the ledger up to and including this line, in bytes."""
    record: LedgerRecord


class _Line(Struct):
    """The JSON form of a record."""

    prompt: str
    outcome: str
    step: int
    version: int
    hash: str


_line_decoder = msgspec.json.Decoder(_Line)


def encode_record(record: LedgerRecord) -> bytes:
    """Return the record's JSON, without a line end."""
    outcome = encode_outcome(record.outcome)
    return msgspec.json.encode(_Line(record.prompt, outcome, record.step, record.version, record.hash))


def decode_record(text: bytes) -> LedgerRecord:
    """Parse one line of the ledger.

    Raises:
        ValueError: the line is no record.
    """
    line = _line_decoder.decode(text)
    return LedgerRecord(line.prompt, decode_outcome(line.outcome), line.step, line.version, line.hash)


def read_ledger(path: Path) -> tuple[list[LedgerLine], list[str]]:
    """Read all complete lines without changing the file.

    Returns:
        The records, and a message for each invalid line.
    """
    lines: list[LedgerLine] = []
    invalid: list[str] = []
    end_offset = 0
    if not path.exists():
        return lines, invalid
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            end_offset += len(text)
            if not text.endswith(b"\n"):
                break  # still being written, or torn when its trainer died
            try:
                lines.append(LedgerLine(number, end_offset, decode_record(text)))
            except ValueError as error:
                invalid.append(f"{path}, line {number}: {error}")
    return lines, invalid


class Ledger:
    """The file, and each prompt's outcome in memory. Only the trainer opens it; others use `read_ledger`.

    Args:
        path: the file; created if missing.
        length: length in the checkpoint, in bytes; everything after it is cut off.
        folder_lock: the trainer's lock on the run's folder, if other trainers may exist.

    Raises:
        RunMismatchError: the file is shorter than `length`, or a line within it is no record; nothing is cut.
        FencedError: another trainer has taken over the run's folder; nothing is cut, and `append` writes nothing.
    """

    def __init__(self, path: Path, length: int = 0, folder_lock: RunFolderLock | None = None) -> None:
        self.path = path
        self.checkpointed_bytes = length
        """The length that the file was cut to."""
        self._folder_lock = folder_lock
        self.outcomes = self.read_outcomes(path, length)
        """The outcome of each prompt."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with hold_optional(folder_lock):
            path.touch()
            os.truncate(path, length)
            self._file = path.open("ab", buffering=0)
        fsync_path(path.parent)

    @staticmethod
    def read_outcomes(path: Path, length: int | None = None) -> dict[str, LedgerOutcome]:
        """Read each prompt's outcome from the first `length` bytes, or from all complete lines; changes nothing.

        Raises:
            RunMismatchError: the file is shorter, or a line is no record.
        """
        content = path.read_bytes() if path.exists() else b""
        if length is None:
            length = content.rfind(b"\n") + 1
        if len(content) < length:
            raise RunMismatchError(f"{path} has {len(content)} bytes, but the checkpoint was made when it had {length}")
        outcomes = {}
        for number, text in enumerate(content[:length].splitlines(keepends=True), 1):
            if not text.endswith(b"\n"):
                raise RunMismatchError(f"{path}, line {number}: the checkpoint's length is inside this line")
            try:
                record = decode_record(text)
            except ValueError as error:
                raise RunMismatchError(f"{path}, line {number}: {error}") from error
            outcomes[record.prompt] = record.outcome
        return outcomes

    def append(self, records: Sequence[LedgerRecord]) -> None:
        """Write records; they are durable only after `sync`.

        Raises:
            RunFailedError: the write failed. A part that was written is after the last checkpoint, so it will be cut.
        """
        with hold_optional(self._folder_lock):
            try:
                write_all(self._file, b"".join(encode_record(record) + b"\n" for record in records))
            except OSError as error:
                raise self._write_error(error) from error
            self.outcomes.update((record.prompt, record.outcome) for record in records)

    def sync(self) -> int:
        """Force all records to the disk. Returns the length in bytes, for the checkpoint.

        Raises:
            RunFailedError: the disk fails.
        """
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._write_error(error) from error
        return self._file.tell()

    def count_outcomes(self) -> dict[str, int]:
        """Return the number of prompts by outcome, in text form."""
        return dict(Counter(map(encode_outcome, self.outcomes.values())))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write_error(self, error: OSError) -> RunFailedError:
        return RunFailedError(
            f"{self.path} could not be written: {error}. Make room on that disk and run again: the run resumes from "
            "its last checkpoint"
        )


def content_hash(group: Group) -> str:
    """Hash what a step depends on: ids, tokens, log-probs, rewards, validity; not times, attempts or workers."""
    facts = [
        (
            *(c.index, c.failure, c.truncated, c.parts, c.reward),
            [(row.prompt_ids, row.token_ids, row.sampled_ranges, row.logprobs, row.spans) for row in c.rows],
        )
        for c in group.completions
    ]
    return hashlib.blake2b(msgspec.msgpack.encode((group.prompt.id, facts)), digest_size=12).hexdigest()
