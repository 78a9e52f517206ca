"""The audit: how each prompt ended, by the ledger, the checkpoint and the server. No counter is used.

A prompt ends with a ledger record of its group, with a dead letter, or with a dead letter that the operator dropped;
the ledger records the latter two as well. Two different ends are one too many. A ledger record after the checkpoint's
length counts only while the server still has the group, because resuming cuts the record off. A prompt without an end
must have an entry in some stage, otherwise it is lost.

A duplicate of a prompt that is in progress, or has ended, is neither lost nor counted: the trainer holds it back.

Prompts move down the streams while they are read, so the streams are read in the order of the flow: a prompt that
moves meanwhile may be seen twice and is never missed. The ledger is read last.
"""

from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct, field
from redis.asyncio import Redis

from stream.connection.keys import STAGES
from stream.connection.run_connection import RunConnection
from stream.operator.sandboxes import SandboxAccount
from stream.operator.status import read_status
from stream.queue.entry_scan import DeadEntry, StreamEntry, scan_dead_entries, scan_stage
from stream.trainer.ledger_records import OPERATOR, Dead, Dropped, LedgerLine, encode_outcome

_IDS_PER_SCAN = 1000


class TurnCounts(Struct, kw_only=True):
    """How many turns of the model were sampled, and what became of them: `sampled = kept + again + unfinished`.

    A turn is counted once the server has it: saved, or completed with its group.
    """

    sampled: int = 0
    kept: int = 0
    """In groups that were rolled out."""
    again: int = 0
    """Lost: sampled again, or given up."""
    unfinished: int = 0
    """Saved, of groups that are still rolled out."""
    resumed: dict[str, int] = field(default_factory=dict)
    """Completions that another worker restored, by how."""

    @property
    def is_balanced(self) -> bool:
        """Every turn is in one place."""
        return self.sampled == self.kept + self.again + self.unfinished


class RunScan(Struct, kw_only=True):
    """What the server knows about a run's prompts."""

    cursor: str = ""
    """The feeder's cursor before anything else was read."""
    data_fingerprint: str = ""
    """The fingerprint of the prompt file that was fed; empty if the feeder has not stored one."""
    rejected_rows: int = 0
    """Rows that the feeder passed by, because they are no prompts."""
    unfinished: set[str] = field(default_factory=set)
    """Prompts without an outcome on the server."""
    entries: list[StreamEntry] = field(default_factory=list)
    dead: list[DeadEntry] = field(default_factory=list)
    dropped_dead: set[str] = field(default_factory=set)
    """Prompts whose dead letters the operator dropped."""
    turns: TurnCounts = field(default_factory=TurnCounts)


async def scan_run(connection: RunConnection) -> RunScan:
    """Read where a run's prompts are.

    Raises:
        PenstockError: the server has no run of that name.
    """
    status = await read_status(connection)
    scan = RunScan(
        cursor=status.feed.get("cursor", ""),
        data_fingerprint=status.meta.get("data", ""),
        rejected_rows=int(status.feed.get("rejected_rows", 0)),
    )
    scan.unfinished = await _members(connection, "unfinished", Redis.hscan)
    for stage in STAGES:
        async for entry in scan_stage(connection, stage):
            scan.entries.append(entry)
    scan.dead = await scan_dead_entries(connection)
    scan.dropped_dead = await _members(connection, "dropped_dead", Redis.sscan)
    scan.turns = await read_turn_counts(connection)
    return scan


async def read_turn_counts(connection: RunConnection) -> TurnCounts:
    """Read what became of the sampled turns, at one moment."""
    counts, *unfinished = await connection.run_script("turn_counts")
    counted = {name.decode(): int(n) for name, n in zip(counts[::2], counts[1::2], strict=True)}
    return TurnCounts(
        **{name: counted.get(name, 0) for name in ("sampled", "kept", "again")},
        unfinished=sum(unfinished),
        resumed={name.partition(":")[2]: n for name, n in sorted(counted.items()) if name.startswith("resumed:")},
    )


async def _members(connection: RunConnection, name: str, scan: Callable[..., Any]) -> set[str]:
    """Return the members of a set, or the fields of a hash. Those added or removed meanwhile may be missing."""
    found: set[str] = set()
    cursor = 0
    while True:
        answer: Any = await connection.with_retry(partial(_scan_once, connection, name, scan, cursor))
        cursor, members = answer
        found |= {member.decode(errors="replace") for member in members}
        if not cursor:
            return found


def _scan_once(connection: RunConnection, name: str, scan: Callable[..., Any], cursor: int) -> Awaitable[Any]:
    found: Awaitable[Any] = scan(connection.redis, connection.key(name), cursor, count=_IDS_PER_SCAN)
    return found


T = TypeVar("T")

_MAX_ERROR_CHARS = 200
"""Characters of a dead letter's error in a finding."""


class AuditInput(Struct, kw_only=True):
    """What an audit reads."""

    fed: AbstractSet[str]
    """Ids of the prompts before the feeder's cursor. Prompts found elsewhere need not be among them."""
    ledger: Sequence[LedgerLine]
    checkpointed_bytes: int | None
    """Length of the ledger in the newest checkpoint; None if it is unknown, then every record counts."""
    scan: RunScan = field(default_factory=RunScan)


class AuditFinding(Struct, frozen=True):
    """A prompt that is lost, or counted twice."""

    prompt: str
    evidence: list[str]
    """Everything known about it, as text."""


class AuditReport(Struct, kw_only=True):
    """Counts of prompts by location: `fed = trained + dropped + dead + outstanding + lost + twice`."""

    fed: int
    trained: int
    dropped: dict[str, int]
    """By reason."""
    dead: int
    outstanding: dict[str, int]
    """By the last stage that has an entry. `marked`: a step took the group and left no record; `again`: will be
    again."""
    lost: list[AuditFinding]
    twice: list[AuditFinding]
    clean: bool
    """Nothing is lost, nothing is counted twice, and every sampled turn is accounted for."""
    unsaved: int
    """Trained or dropped prompts that no checkpoint contains yet; after a crash they are trained or dropped again."""
    foreign_entries: int
    """Entries and dead letters that belong to no prompt of this run, and dead letters of duplicates."""
    turns: TurnCounts = field(default_factory=TurnCounts)
    """What became of the sampled turns."""
    sandboxes: SandboxAccount | None = None
    """None if the server was not read."""
    notes: list[str] = field(default_factory=list)
    """What the audit could not read, and other remarks."""


def audit(facts: AuditInput) -> AuditReport:
    """Locate every prompt."""
    scan = facts.scan
    lines = _group_by_prompt(facts.ledger, lambda line: line.record.prompt)
    dead = _group_by_prompt((letter for letter in scan.dead if letter.ends_prompt), lambda letter: letter.prompt)
    entries = _group_by_prompt(scan.entries, lambda entry: entry.prompt)
    locations: Counter[str] = Counter()
    findings: dict[str, list[AuditFinding]] = {"lost": [], "twice": []}
    unsaved = 0
    prompts = facts.fed | scan.unfinished | lines.keys() | dead.keys() | scan.dropped_dead
    for prompt in prompts:
        evidence = _PromptEvidence(
            lines=lines.get(prompt, []),
            dead=dead.get(prompt, []),
            dropped_dead=prompt in scan.dropped_dead,
            entries=entries.get(prompt, []),
            unfinished=prompt in scan.unfinished,
            fed=prompt in facts.fed,
            checkpointed_bytes=facts.checkpointed_bytes,
        )
        location = evidence.location()
        locations[location] += 1
        has_ended = location.startswith(("trained", "dropped"))
        unsaved += has_ended and any(
            line.record.has_group and not evidence.is_checkpointed(line) for line in evidence.lines
        )
        if location in findings:
            findings[location].append(AuditFinding(prompt, evidence.describe()))
    lost, twice = (sorted(findings[name], key=lambda finding: finding.prompt) for name in ("lost", "twice"))
    return AuditReport(
        fed=len(prompts),
        trained=locations["trained"],
        dropped=_count_details(locations, "dropped"),
        dead=locations["dead"],
        outstanding=_count_details(locations, "outstanding"),
        lost=lost,
        twice=twice,
        clean=not lost and not twice and scan.turns.is_balanced,
        turns=scan.turns,
        unsaved=unsaved,
        foreign_entries=sum(entry.prompt not in prompts for entry in scan.entries)
        + sum(not letter.ends_prompt for letter in scan.dead),
    )


class _PromptEvidence(Struct, kw_only=True):
    """Everything known about one prompt."""

    lines: list[LedgerLine]
    dead: list[DeadEntry]
    dropped_dead: bool
    entries: list[StreamEntry]
    unfinished: bool
    fed: bool
    checkpointed_bytes: int | None

    def is_checkpointed(self, line: LedgerLine) -> bool:
        """Return whether a checkpoint contains this line of the ledger."""
        return self.checkpointed_bytes is not None and line.end_offset <= self.checkpointed_bytes

    def location(self) -> str:
        """Return `trained`, `dropped:REASON`, `dead`, `outstanding:STAGE`, `lost` or `twice`."""
        trained = [line for line in self.lines if line.record.has_group]
        dropped_dead = self.dropped_dead or any(line.record.outcome == Dropped(OPERATOR) for line in self.lines)
        if len(trained) + len(self.dead) + dropped_dead > 1:
            return "twice"
        if self.dead:
            return "dead"
        if dropped_dead:
            return "dropped:operator"
        if trained:
            return self._location_by_ledger(trained[0])
        if not self.entries:
            return "dead" if self._is_dead_by_ledger else "lost"
        if all(entry.marked for entry in self.entries):
            return "outstanding:marked"
        return f"outstanding:{max((entry.stage for entry in self.entries), key=_stage_order)}"

    @property
    def _is_dead_by_ledger(self) -> bool:
        """Whether the last record is that of a dead letter, which the server has forgotten."""
        return bool(self.lines) and isinstance(self.lines[-1].record.outcome, Dead)

    def _location_by_ledger(self, line: LedgerLine) -> str:
        if self.checkpointed_bytes is None or self.is_checkpointed(line) or self.entries:
            return encode_outcome(line.record.outcome)
        # A server that lost its last writes, or all of them, may not have been fed the prompt again yet.
        return "lost" if self.fed or self.unfinished else "outstanding:again"

    def describe(self) -> list[str]:
        """Return the evidence as text."""
        texts = [
            f"ledger line {line.number}: {encode_outcome(line.record.outcome)} in step {line.record.step}, "
            f"version {line.record.version}{'' if self.is_checkpointed(line) else ', which no checkpoint holds'}"
            for line in self.lines
        ]
        texts += [f"dead letter {d.id} of {d.stage}: {d.reason}: {d.error[:_MAX_ERROR_CHARS]}" for d in self.dead]
        texts += ["its dead letter was dropped by the operator"] if self.dropped_dead else []
        texts += [f"entry {e.id} in {e.stage}{', marked' if e.marked else ''}" for e in self.entries]
        if not self.entries:
            texts.append(
                "unfinished on the server, which has no entry of it" if self.unfinished else "no entry on the server"
            )
        return texts


def _stage_order(stage: str) -> int:
    return STAGES.index(stage) if stage in STAGES else -1


def _group_by_prompt(items: Iterable[T], prompt: Callable[[T], str]) -> dict[str, list[T]]:
    groups: defaultdict[str, list[T]] = defaultdict(list)
    for item in items:
        groups[prompt(item)].append(item)
    return groups


def _count_details(locations: Counter[str], kind: str) -> dict[str, int]:
    """Return the counts of `kind:DETAIL`, by detail."""
    return {name.partition(":")[2]: n for name, n in sorted(locations.items()) if name.startswith(f"{kind}:")}
