"""The ledger: one append-only file per run with a record of every end: trained, dropped, dead letter, retried.

It outlives Redis and pruned checkpoints. A checkpoint holds the ledger's length; resuming cuts the file to that length,
so ledger and weights always contain the same groups.
"""

import hashlib
import io
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from stream.disk_space import persist
from stream.durable import append_all, fsync_path, write_file_atomically
from stream.errors import RunFailedError, RunMismatchError
from stream.trainer.folder_lock import RunFolderLock, hold_optional
from stream.trainer.ledger_records import (
    OPERATOR,
    Dropped,
    LedgerEntry,
    LedgerEvent,
    LedgerRecord,
    Retried,
    apply_record,
    describe_first_error,
    digest_of,
    encode_outcome,
    encode_record,
    end_hash,
    find_rebuilt,
    is_untrained,
    parse_contents,
    record_or_none,
)


class Ledger:
    """The file, and each prompt's outcome in memory. Only the trainer opens it; others use `read_ledger`.

    Args:
        path: the file; created if missing.
        length: length in the checkpoint, in bytes; everything after it is cut off. Ends that were decided without the
            trainer (dead letters, and what the operator did with them) stay, because no weights depend on them.
        folder_lock: the trainer's lock on the run's folder, if other trainers may exist.
        digest: of the first `length` bytes, from the checkpoint; empty: unknown.
        cut: False leaves the file as it is until `cut` is called, so that the caller can check first.
        rebuilt: takes the place of the file, which is damaged; the file is kept beside it.

    Raises:
        RunMismatchError: the file is shorter than `length`, a line within it is no record, or it was altered; nothing
            is cut.
        FencedError: another trainer has taken over the run's folder; nothing is cut, and `append` writes nothing.
    """

    def __init__(
        self,
        path: Path,
        length: int = 0,
        folder_lock: RunFolderLock | None = None,
        *,
        digest: str = "",
        cut: bool = True,
        rebuilt: bytes | None = None,
    ) -> None:
        self.path = path
        found = rebuilt or (path.read_bytes() if path.exists() else b"")
        length, digest = find_rebuilt(found, length, digest)
        self.checkpointed_bytes = length
        """The length that the file is cut to."""
        self.resumed_bytes = length
        """The length after the cut: ends that were decided without the trainer stay."""
        self._folder_lock = folder_lock
        self._file: io.FileIO | None = None
        self._rebuilt = rebuilt
        self.rebuilt_text = ""
        """What was rebuilt, in a sentence; empty: nothing."""
        self.archived_prompts: set[str] = set()
        """Prompts of the archive, once it was read: they were trained or dropped by some trainer of this run."""
        content, begin = self._history(found, length, digest)
        self._restored = (begin, content[begin:length])
        """Offset and bytes of a part that was cut off, and that the checkpoint contains after all."""
        contained = parse_contents(path, content, length)
        self.outcomes = contained.outcomes
        """How each prompt ended that was trained or dropped."""
        self.dead = contained.dead
        """Prompts that are dead letters."""
        self._digest = hashlib.blake2b(content[:length], digest_size=16)
        self._tail = content[length:]
        if begin < length:
            self._tail += _without(found[begin:], _untrained_lines(content[begin:]))
        if cut:
            self.cut()

    def cut(self, *, keep_cut: bool = False) -> None:
        """Cut the file to the checkpoint's length.

        Args:
            keep_cut: the checkpoint is not the newest one, which cannot be read: keep what is cut in a file beside
                the ledger, so that the newest one can still be used if it comes back.

        Raises:
            FencedError: another trainer has taken over the run's folder; nothing is cut.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = self._counting_lines(_untrained_lines(self._tail))

        def write() -> None:
            with hold_optional(self._folder_lock):
                if keep_cut and self._tail:
                    self._write_cut_part()
                if self._rebuilt is None:
                    self._write_cut(kept)
                else:
                    self._write_rebuilt(self._rebuilt[: self.checkpointed_bytes] + kept)
                self._file = self.path.open("ab", buffering=0)

        persist(self.path, write)
        fsync_path(self.path.parent)
        self._digest.update(kept)
        self.resumed_bytes = self.checkpointed_bytes + len(kept)
        self._tail = b""

    def _write_cut(self, kept: bytes) -> None:
        self.path.touch()
        with self.path.open("r+b") as file:
            file.seek(self._restored[0])
            file.write(self._restored[1])
            # In this order a kill leaves every kept line in the file.
            file.seek(self.checkpointed_bytes)
            file.write(kept)
            file.flush()
            os.fsync(file.fileno())
            file.truncate(self.checkpointed_bytes + len(kept))
            os.fsync(file.fileno())
        if self._restored[1]:
            for _, _, cut_part in self._cut_parts():
                cut_part.unlink()

    def _write_rebuilt(self, content: bytes) -> None:
        """Replace the damaged file, which stays beside it."""
        token = 0 if self._folder_lock is None else self._folder_lock.token
        damaged = self.path.with_name(f"{self.path.name}.damaged-{token}")
        if self.path.exists() and not damaged.exists():
            damaged.hardlink_to(self.path)
        write_file_atomically(self.path, content)

    @property
    def is_rebuilt(self) -> bool:
        """Whether it was rebuilt, so that the file knew less than the server may have deleted."""
        return self._rebuilt is not None

    @property
    def is_cut(self) -> bool:
        """Whether the file ends where the checkpoint was made, so that records may be written."""
        return self._file is not None

    @property
    def length(self) -> int:
        """The checkpoint's length; after the cut the length of the file, in bytes."""
        return self.checkpointed_bytes if self._file is None else self._file.tell()

    @property
    def known_prompts(self) -> set[str]:
        """Every prompt with an outcome in the file, before it is cut, or in what was cut off and kept aside."""
        cut_parts = [cut_part.read_bytes() for _, _, cut_part in self._cut_parts()]
        found = (record_or_none(text) for part in (self._tail, *cut_parts) for text in part.splitlines())
        return {record.prompt for record in found if record is not None} | self.outcomes.keys() | self.archived_prompts

    @property
    def file_bytes(self) -> int:
        """Length of the file before it is cut, or with what was cut off and kept aside, if that is longer."""
        ends = [offset + cut_part.stat().st_size for _, offset, cut_part in self._cut_parts()]
        return max(self.length + len(self._tail), *ends, 0)

    def is_abandoned(self, length: int, token: int) -> bool:
        """Return whether a part of the ledger was cut off, and its groups are not among the outcomes.

        Args:
            length: end of the part.
            token: fencing token of the trainer that wrote it.
        """
        return any(offset < length and token < later for later, offset, _ in self._cut_parts())

    def append(self, records: Sequence[LedgerRecord]) -> None:
        """Write records; they are durable only after `sync`. While the disk is full, this waits for room.

        Raises:
            RunFailedError: the write failed. Nothing of it is in the file.
        """
        self._write(b"".join(encode_record(record) + b"\n" for record in records), records)

    def append_event(self, event: LedgerEvent) -> None:
        """Write an event; it stays when the ledger is cut to a checkpoint.

        Raises:
            RunFailedError: the write failed.
        """
        self._write(msgspec.json.encode(event) + b"\n", ())

    def _write(self, written: bytes, records: Sequence[LedgerRecord]) -> None:
        if self._file is None:
            raise ValueError("the ledger was not cut to its checkpoint")
        file = self._file

        def write() -> None:
            with hold_optional(self._folder_lock):
                append_all(file, written)

        try:
            persist(self.path, write)
        except OSError as error:
            raise self._write_error(error) from error
        self._digest.update(written)
        for record in records:
            self._remember(record)

    def append_end(self, prompt: str, entry: LedgerEntry, step: int, version: int) -> bool:
        """Record an end that was decided without the trainer; see `outcomes` for what it ends.

        Returns:
            False if the prompt was trained or dropped before, so that this end does not count, or if the ledger has
            this end already; nothing is written.
        """
        if not self._counts(prompt, entry):
            return False
        self.append([LedgerRecord(prompt, entry, step, version, end_hash(prompt, entry))])
        return True

    def sync(self) -> int:
        """Force all records to the disk. Returns the length in bytes, for the checkpoint.

        Raises:
            RunFailedError: the disk fails.
        """
        if self._file is None:
            raise ValueError("the ledger was not cut to its checkpoint")
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._write_error(error) from error
        return self._file.tell()

    def digest(self) -> str:
        """Return the digest of everything up to now, for the checkpoint."""
        return self._digest.copy().hexdigest()

    def count_outcomes(self) -> dict[str, int]:
        """Return the number of prompts that trainers ended, by outcome, in text form."""
        counts = Counter(map(encode_outcome, list(self.outcomes.values())))
        del counts[encode_outcome(Dropped(OPERATOR))]
        return dict(counts)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _remember(self, record: LedgerRecord) -> None:
        apply_record(record, self.outcomes, self.dead)

    def _counts(self, prompt: str, entry: LedgerEntry) -> bool:
        """Whether an end that was decided without the trainer changes how the prompt stands."""
        return prompt not in self.outcomes and self.dead.get(prompt, Retried()) != entry

    def _counting_lines(self, lines: bytes) -> bytes:
        """Remember the ends in these lines; returns the lines without those that do not count."""
        kept = []
        for text in lines.splitlines(keepends=True):
            record = record_or_none(text)
            if record is not None and not self._counts(record.prompt, record.outcome):
                continue
            if record is not None:
                self._remember(record)
            kept.append(text)
        return b"".join(kept)

    def _history(self, content: bytes, length: int, digest: str) -> tuple[bytes, int]:
        """Return the ledger of the checkpoint: the file, or the file with a part that was cut off before.

        Returns:
            The ledger, and the offset from which it is not in the file; `length` if the file has all of it.

        Raises:
            RunMismatchError: neither is the ledger that the checkpoint was made with.
        """
        candidates = [(content, length)]
        candidates += [
            (content[:offset] + cut_part.read_bytes(), offset)
            for _, offset, cut_part in self._cut_parts()
            if offset <= length
        ]
        for candidate, begin in candidates:
            if len(candidate) >= length and (not digest or digest_of(candidate[:length]) == digest):
                return candidate, begin
        if len(content) < length:
            raise RunMismatchError(
                f"{self.path} has {len(content)} bytes, but the checkpoint was made when it had {length}. Restore the "
                "file"
            )
        broken = [error for error in [describe_first_error(self.path, content[:length])] if error]
        raise RunMismatchError(
            f"{broken[0] if broken else self.path}: the file was altered: its first {length} bytes are not those that "
            "the checkpoint was made with. Restore the file"
        )

    def _write_cut_part(self) -> None:
        token = 0 if self._folder_lock is None else self._folder_lock.token
        cut_part = self.path.with_name(f"{self.path.name}.cut-{self.checkpointed_bytes}-{token}")
        if not cut_part.exists():
            write_file_atomically(cut_part, self._tail)

    def _cut_parts(self) -> list[tuple[int, int, Path]]:
        """Return the parts that were cut off: token of the trainer that cut, offset, file; the latest first."""
        found = []
        for cut_part in self.path.parent.glob(f"{self.path.name}.cut-*"):
            offset, _, token = cut_part.name.rpartition(".cut-")[2].partition("-")
            if offset.isdecimal() and token.isdecimal():
                found.append((int(token), int(offset), cut_part))
        return sorted(found, reverse=True)

    def _write_error(self, error: OSError) -> RunFailedError:
        return RunFailedError(
            f"{self.path} could not be written: {error}. Make room on that disk and run again: the run resumes from "
            "its last checkpoint"
        )


def _untrained_lines(tail: bytes) -> bytes:
    """Return the intact lines of events, and of ends that were decided without the trainer."""
    return b"".join(text for text in tail.splitlines(keepends=True) if is_untrained(text))


def _without(lines: bytes, copies: bytes) -> bytes:
    """Return the lines without one occurrence of each line in `copies`."""
    left, kept = Counter(copies.splitlines(keepends=True)), []
    for text in lines.splitlines(keepends=True):
        if left[text] > 0:
            left[text] -= 1
        else:
            kept.append(text)
    return b"".join(kept)
