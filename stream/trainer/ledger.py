"""The ledger: one append-only file over the whole run, a line for each group trained or dropped.

It outlives Redis and pruned checkpoints. A checkpoint holds the ledger's length; resuming cuts what lies behind, so
that the ledger and the weights always tell the same story.
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


class LedgerRecord(Struct, frozen=True, omit_defaults=True):
    """One group's end."""

    prompt: str
    outcome: str
    """`trained`, or `dropped:REASON`."""
    step: int
    """The optimizer step that it was part of, or that came after it was dropped; the first is 1."""
    version: int
    """The policy version that the trainer had then."""
    hash: str
    """Of the group's content (`content_hash`)."""


class LedgerLine(Struct, frozen=True):
    """A line where it stands."""

    number: int
    """The first is 1."""
    end_offset: int
    """Bytes of the ledger that end with it."""
    record: LedgerRecord


def read_ledger(path: Path) -> tuple[list[LedgerLine], list[str]]:
    """All whole lines, and of those that are no end of a group, why. For those who look; changes nothing."""
    decoder = msgspec.json.Decoder(LedgerRecord)
    written: list[LedgerLine] = []
    broken: list[str] = []
    upto = 0
    if not path.exists():
        return written, broken
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            upto += len(text)
            if not text.endswith(b"\n"):
                break  # still being written, or torn when its trainer died
            try:
                line = decoder.decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                broken.append(f"{path}, line {number}: {error}")
                continue
            if line.outcome == "trained" or line.outcome.startswith("dropped:"):
                written.append(LedgerLine(number, upto, line))
            else:
                broken.append(f"{path}, line {number}: {line.outcome!r} is no end")
    return written, broken


class Ledger:
    """The file and, in memory, each prompt's end. For the trainer alone; others `read` it.

    Args:
        path: the file; made where it does not exist.
        length: bytes to keep, from a checkpoint; what lies behind is cut off.
        folder_lock: the trainer's right to the file, where another one may come.

    Raises:
        RunMismatchError: the file is shorter than the checkpoint says, or a line within that length is no line; then
            nothing is cut.
        FencedError: a successor has taken the run's folder; nothing is cut. So does `append`, and writes nothing.
    """

    def __init__(self, path: Path, length: int = 0, folder_lock: RunFolderLock | None = None) -> None:
        self.path = path
        self.checkpointed_bytes = length
        """Bytes that it was cut to."""
        self._folder_lock = folder_lock
        self.outcomes = self.read_outcomes(path, length)
        """Each prompt's end: `trained`, `dropped:REASON`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with hold_optional(folder_lock):
            path.touch()
            os.truncate(path, length)
            self._file = path.open("ab", buffering=0)
        fsync_path(path.parent)

    @staticmethod
    def read_outcomes(path: Path, length: int | None = None) -> dict[str, str]:
        """Each prompt's end in the first `length` bytes, or in all whole lines; changes nothing.

        Raises:
            RunMismatchError: the file is shorter, or something in there is no line.
        """
        content = path.read_bytes() if path.exists() else b""
        if length is None:
            length = content.rfind(b"\n") + 1
        if len(content) < length:
            raise RunMismatchError(f"{path} has {len(content)} bytes, but the checkpoint was made when it had {length}")
        decoder = msgspec.json.Decoder(LedgerRecord)
        ends = {}
        for number, text in enumerate(content[:length].splitlines(keepends=True), 1):
            try:
                if not text.endswith(b"\n"):
                    raise RunMismatchError(f"{path}, line {number}: the checkpoint was made when it ended elsewhere")
                line = decoder.decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise RunMismatchError(f"{path}, line {number}: {error}") from error
            ends[line.prompt] = line.outcome
        return ends

    def append(self, records: Sequence[LedgerRecord]) -> None:
        """Write lines; durable only after `sync`.

        Raises:
            RunFailedError: they could not be written. What was, lies behind the last checkpoint and will be cut.
        """
        with hold_optional(self._folder_lock):
            try:
                write_all(self._file, b"".join(msgspec.json.encode(line) + b"\n" for line in records))
            except OSError as error:
                raise self._write_error(error) from error
            self.outcomes.update((line.prompt, line.outcome) for line in records)

    def sync(self) -> int:
        """Make all lines durable. Returns the length in bytes, for the checkpoint.

        Raises:
            RunFailedError: the disk refuses.
        """
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._write_error(error) from error
        return self._file.tell()

    def count_outcomes(self) -> dict[str, int]:
        """Prompts by end: `trained`, `dropped:REASON`."""
        return dict(Counter(self.outcomes.values()))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write_error(self, error: OSError) -> RunFailedError:
        return RunFailedError(
            f"{self.path} could not be written: {error}. Make room on that disk and run again: the run resumes from "
            "its last checkpoint"
        )


def content_hash(group: Group) -> str:
    """A hash of what the trainer sees: ids, tokens, log-probs, rewards, validity; not times, attempts or workers."""
    facts = [
        (
            *(c.index, c.failure, c.truncated, c.parts, c.reward),
            [(row.prompt_ids, row.token_ids, row.sampled_ranges, row.logprobs, row.spans) for row in c.rows],
        )
        for c in group.completions
    ]
    return hashlib.blake2b(msgspec.msgpack.encode((group.prompt.id, facts)), digest_size=12).hexdigest()
