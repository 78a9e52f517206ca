"""Rebuild a damaged ledger from the archive and the server, as far as a checkpoint's weights are known to contain it.

The archive has the ledger's record of each group that ended at a trainer, also of steps that were lost with their
trainer. Which of them the weights contain follows from the checkpoint: its step and version, the points that the run
was resumed from before, and the number of groups trained. If that number is not found again, nothing is rebuilt: a
prompt that is missing would be trained twice. Ends that have no group come from the intact lines and from the server.

A rebuilt ledger has other bytes than the checkpoint was made with. Its last line is an event that names the
checkpoint's length and digest, so that the next start accepts it for this checkpoint (`find_rebuilt`).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread
import msgspec
from msgspec import Struct

from stream.connection.run_connection import RunConnection
from stream.errors import RunMismatchError
from stream.queue.entry_scan import scan_dead_entries
from stream.trainer.archive import scan_archive
from stream.trainer.leased_group import ResumePoint
from stream.trainer.ledger_records import (
    OPERATOR,
    REBUILT,
    Dead,
    Dropped,
    LedgerEntry,
    LedgerEvent,
    LedgerRecord,
    Retried,
    Trained,
    digest_of,
    encode_record,
    end_hash,
    is_untrained,
    parse_contents,
    record_or_none,
)

_NAMED_STEPS: Final = 5


class RebuiltLedger(Struct, frozen=True):
    """A ledger for a checkpoint, whose own was damaged."""

    content: bytes
    groups: int
    """Records from the archive."""
    ends: int
    """Ends from the server: dead letters, and what an operator did with them."""

    def __str__(self) -> str:
        return (
            f"the damaged ledger was rebuilt: {self.groups} groups from the archive, {self.ends} ends from the server"
        )


class _ServerEnds(Struct, frozen=True):
    """What the server knows about prompts."""

    is_empty: bool
    open: frozenset[str]
    """Prompts that are unfinished, or marked and not acknowledged: if the ledger lacks them, they come again."""
    dead: dict[str, Dead]
    dropped: frozenset[str]
    """Dead letters that an operator has dropped."""

    @classmethod
    async def read(cls, connection: RunConnection) -> "_ServerEnds":
        ended, _, flat, unfinished, _ = await connection.run_script("read_recovery")
        marked = [item.decode(errors="replace") for item in flat[1::3]]
        names = [prompt.decode(errors="replace") for prompt in unfinished]
        letters = await scan_dead_entries(connection)
        answer: Any = await connection.with_retry(lambda: connection.redis.smembers(connection.key("dropped_dead")))
        return cls(
            is_empty=not ended and not names,
            open=frozenset({*marked, *names}),
            dead={letter.prompt: Dead(letter.reason) for letter in letters if letter.ends_prompt},
            dropped=frozenset(prompt.decode(errors="replace") for prompt in answer),
        )


async def rebuild_ledger(
    connection: RunConnection, path: Path, resume: ResumePoint, archive: Path, damage: RunMismatchError
) -> RebuiltLedger:
    """Return the ledger that a checkpoint was made with, or one that says the same. Changes nothing.

    Args:
        connection: to the run.
        path: of the damaged ledger; it may be missing.
        resume: of the checkpoint.
        archive: folder of the run's groups.
        damage: why the ledger cannot be used.

    Raises:
        RunMismatchError: neither archive nor ledger have all groups that the weights contain.
    """
    ends = await _ServerEnds.read(connection)

    def rebuild() -> RebuiltLedger:
        parts = _Parts.read(path, resume, archive)
        return parts.restore(resume) or parts.rebuild(resume, ends, damage)

    return await anyio.to_thread.run_sync(rebuild)


class _Parts(Struct):
    """What is intact."""

    prefix: list[bytes]
    """Lines of the ledger up to the damage."""
    rest: list[bytes]
    """Intact lines behind it that have no group."""
    trained: list[LedgerRecord]
    """Archived groups that the weights contain and `prefix` lacks, in the order of the archive."""
    dropped: dict[str, LedgerRecord]
    """The last archived drop of each other prompt."""
    is_damage_seen: bool
    """A line of the ledger is missing or none. Otherwise a value of a line may be wrong that nothing confirms."""
    is_confirmed: bool
    """Every group in `prefix` is in the archive."""
    prefix_trained: set[str]

    @classmethod
    def read(cls, path: Path, resume: ResumePoint, archive: Path) -> "_Parts":
        archived = list(dict.fromkeys(record for record, _ in scan_archive(archive)))
        known, versions = set(archived), _versions(archived, resume)
        oldest_step = min((record.step for record in archived), default=resume.step + 1)
        content = path.read_bytes() if path.exists() else b""
        prefix, confirmed, trained, place = list[bytes](), True, dict[str, LedgerRecord](), 0
        for text in content[: resume.ledger_bytes].splitlines(keepends=True):
            record = record_or_none(text) if text.endswith(b"\n") else None
            if record is not None and record.has_group:
                if record not in known and record.step >= oldest_step:
                    break
                confirmed = confirmed and record in known
                if record.outcome == Trained():
                    if versions.get(record.step, record.version) != record.version:
                        break  # of a step that was lost with its trainer: an older copy of the ledger
                    trained[record.prompt] = record
            elif not is_untrained(text):
                break
            prefix.append(text)
            place += len(text)
        in_weights = [r for r in archived if r.outcome == Trained() and versions.get(r.step) == r.version]
        names = {record.prompt for record in in_weights} | trained.keys()
        return cls(
            prefix=prefix,
            rest=[text for text in content[place:].splitlines(keepends=True) if is_untrained(text)],
            trained=[record for record in in_weights if record.prompt not in trained],
            dropped={r.prompt: r for r in archived if isinstance(r.outcome, Dropped) and r.prompt not in names},
            is_damage_seen=place < resume.ledger_bytes,
            is_confirmed=confirmed,
            prefix_trained=set(trained),
        )

    def restore(self, resume: ResumePoint) -> RebuiltLedger | None:
        """Return the ledger with the very bytes of the checkpoint; None if the archive does not give them."""
        missing = [*self.trained, *(r for r in self.dropped.values() if r.step <= resume.step + 1)]
        ended = self._ended_in_prefix()
        missing = [record for record in missing if record.prompt not in ended]
        missing.sort(key=lambda record: record.step)  # a group is dropped before the step that it came too early for
        for order in (missing, sorted(missing, key=lambda record: (record.step, record.outcome == Trained()))):
            content, count = b"".join(self.prefix), 0
            for record in order:
                if len(content) < resume.ledger_bytes:
                    content, count = content + encode_record(record) + b"\n", count + 1
            if len(content) == resume.ledger_bytes and digest_of(content) == resume.ledger_digest:
                return RebuiltLedger(content + b"".join(self.rest), count, 0)
        return None

    def rebuild(self, resume: ResumePoint, ends: _ServerEnds, damage: RunMismatchError) -> RebuiltLedger:
        """Return a ledger that says the same as the checkpoint's.

        Raises:
            RunMismatchError: groups are missing, or it is not known which are.
        """
        known = len(self.prefix_trained) + len(self.trained)
        if not resume.ledger_digest or resume.groups < 0 or not (self.is_damage_seen or self.is_confirmed):
            raise damage
        if known != resume.groups:
            raise RunMismatchError(
                f"{damage}. It cannot be rebuilt: the checkpoint's weights contain {resume.groups} groups, of which "
                f"ledger and archive know {known}{self._describe_gaps(resume)}; the others would be trained twice"
            )
        ended = self._ended_in_prefix()
        records = [*self.trained, *(r for r in self.dropped.values() if _has_ended(r, resume, ends))]
        records = [record for record in sorted(records, key=lambda r: r.step) if record.prompt not in ended]
        body = b"".join([*self.prefix, *(encode_record(record) + b"\n" for record in records), *self.rest])
        found = parse_contents(Path(), body, len(body))
        more = list[LedgerRecord]()
        for prompt, end in _server_records(ends):
            if prompt not in found.outcomes and found.dead.get(prompt, Retried()) != end:
                more.append(LedgerRecord(prompt, end, resume.step, resume.version, end_hash(prompt, end)))
        body += b"".join(encode_record(record) + b"\n" for record in more)
        return RebuiltLedger(body + _seal(body, resume, len(records), len(more)), len(records), len(more))

    def _describe_gaps(self, resume: ResumePoint) -> str:
        """Name the first steps of which nothing is known."""
        in_prefix = [record for text in self.prefix if (record := record_or_none(text)) is not None]
        known = {record.step for record in (*in_prefix, *self.trained)}
        missing = [step for step in range(1, resume.step + 1) if step not in known]
        more = ", …" if len(missing) > _NAMED_STEPS else ""
        return f" (none of step {', '.join(map(str, missing[:_NAMED_STEPS]))}{more})" if missing else ""

    def _ended_in_prefix(self) -> set[str]:
        return {record.prompt for text in self.prefix if (record := record_or_none(text)) and record.has_group}


def _seal(body: bytes, resume: ResumePoint, groups: int, ends: int) -> bytes:
    """Return the last line of a rebuilt ledger. It makes the ledger at least as long as it was.

    The server knows up to which byte of the ledger it has deleted groups.
    """
    details = {
        "checkpoint_bytes": resume.ledger_bytes,
        "checkpoint_digest": resume.ledger_digest,
        "digest": digest_of(body),
        "groups": groups,
        "ends": ends,
        "padding": "",
    }
    line = msgspec.json.encode(LedgerEvent(REBUILT, resume.step, details)) + b"\n"
    details["padding"] = " " * max(0, resume.ledger_bytes - len(body) - len(line))
    return msgspec.json.encode(LedgerEvent(REBUILT, resume.step, details)) + b"\n"


def _versions(archived: list[LedgerRecord], resume: ResumePoint) -> dict[int, int]:
    """Return for each archived step that the weights contain the version under which it was trained.

    A step that was lost with its trainer was repeated under a later version; but not under one later than that of a
    checkpoint which contains it.
    """
    versions: dict[int, int] = {}
    points = [*resume.resumed, (resume.step, resume.version)]
    for record in archived:
        if record.outcome == Trained() and record.step <= resume.step:
            bound = min(version for step, version in points if step >= record.step)
            if record.version <= bound:
                versions[record.step] = max(record.version, versions.get(record.step, -1))
    return versions


def _has_ended(record: LedgerRecord, resume: ResumePoint, ends: _ServerEnds) -> bool:
    """Whether a dropped group stays dropped: the server delivers its prompt no more."""
    if ends.is_empty:
        return record.step <= resume.step
    return record.prompt not in ends.open and record.prompt not in ends.dead


def _server_records(ends: _ServerEnds) -> Iterator[tuple[str, LedgerEntry]]:
    """Yield the ends that the server knows, and prompts that are open again."""
    yield from ends.dead.items()
    yield from ((prompt, Dropped(OPERATOR)) for prompt in sorted(ends.dropped))
    yield from ((prompt, Retried()) for prompt in sorted(ends.open))
