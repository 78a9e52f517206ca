"""Where each prompt fed has ended, told from the ledger, the checkpoint and the server alone; no counter is trusted.

A prompt has ended by a line of the ledger, by a dead letter, or because the operator dropped its letter; two of these
are one too many. A line that no checkpoint holds is an end only as long as the server could bring the group again, for
resuming cuts it off. Without an end there must be an entry of it in some stage, or nothing will ever bring one.

A second copy of a prompt that is under way, or has ended, is neither lost nor counted: the trainer holds it back.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import TypeVar

from msgspec import Struct, field

from stream.connection.keys import STAGES
from stream.operator.run_scan import DeadEntry, RunScan, StreamEntry
from stream.trainer.ledger import LedgerLine
from stream.trainer.outcomes import encode_outcome

T = TypeVar("T")

_MAX_ERROR_CHARS = 200
"""Characters of a dead letter's error that are told."""


class AuditInput(Struct, kw_only=True):
    """What an audit judges."""

    fed: AbstractSet[str]
    """The prompts that the feeder has passed, by its cursor. Those seen elsewhere need not be among them."""
    ledger: Sequence[LedgerLine]
    """The ledger."""
    checkpointed_bytes: int | None
    """Bytes of it that the newest checkpoint holds; None where nobody knows: then no line is doubted."""
    scan: RunScan = field(default_factory=RunScan)


class Finding(Struct, frozen=True):
    """A prompt that is lost, or counted twice."""

    prompt: str
    evidence: list[str]
    """All that is known of it."""


class AuditReport(Struct, kw_only=True):
    """Every prompt fed is in one place: `fed = trained + dropped + dead + outstanding + lost + twice`."""

    fed: int
    trained: int
    dropped: dict[str, int]
    """By reason."""
    dead: int
    outstanding: dict[str, int]
    """By the furthest stage that has it; `marked`: a step took it that left no line; `again`: to be fed once more."""
    lost: list[Finding]
    twice: list[Finding]
    clean: bool
    """Nothing is lost, nothing counted twice."""
    unsaved: int
    """Of those trained and dropped: no checkpoint holds them yet; a run that dies now does them again."""
    junk: int
    """Entries and dead letters that are no prompt's of this run, or one's second copy that died."""
    notes: list[str] = field(default_factory=list)
    """What the audit could not see, and what else it noticed."""


def audit(facts: AuditInput) -> AuditReport:
    """Say of each prompt where it ended, or is."""
    census = facts.scan
    lines = _group_by_prompt(facts.ledger, lambda written: written.record.prompt)
    dead = _group_by_prompt((letter for letter in census.dead if letter.ends_prompt), lambda letter: letter.prompt)
    entries = _group_by_prompt(census.entries, lambda entry: entry.prompt)
    places: Counter[str] = Counter()
    suspects: dict[str, list[Finding]] = {"lost": [], "twice": []}
    unsaved = 0
    prompts = facts.fed | census.unfinished | lines.keys() | dead.keys() | census.dropped_dead
    for prompt in prompts:
        known = _PromptEvidence(
            lines=lines.get(prompt, []),
            dead=dead.get(prompt, []),
            dropped_dead=prompt in census.dropped_dead,
            entries=entries.get(prompt, []),
            unfinished=prompt in census.unfinished,
            fed=prompt in facts.fed,
            checkpointed_bytes=facts.checkpointed_bytes,
        )
        place = known.location()
        places[place] += 1
        unsaved += any(not known.is_checkpointed(written) for written in known.lines) and place.startswith(
            ("trained", "dropped")
        )
        if place in suspects:
            suspects[place].append(Finding(prompt, known.describe()))
    lost, twice = (sorted(suspects[name], key=lambda finding: finding.prompt) for name in ("lost", "twice"))
    return AuditReport(
        fed=len(prompts),
        trained=places["trained"],
        dropped=_count_details(places, "dropped"),
        dead=places["dead"],
        outstanding=_count_details(places, "outstanding"),
        lost=lost,
        twice=twice,
        clean=not lost and not twice,
        unsaved=unsaved,
        junk=sum(entry.prompt not in prompts for entry in census.entries)
        + sum(not letter.ends_prompt for letter in census.dead),
    )


class _PromptEvidence(Struct, kw_only=True):
    """Everything known of one prompt."""

    lines: list[LedgerLine]
    dead: list[DeadEntry]
    dropped_dead: bool
    entries: list[StreamEntry]
    unfinished: bool
    fed: bool
    checkpointed_bytes: int | None

    def is_checkpointed(self, written: LedgerLine) -> bool:
        """Whether a checkpoint holds this line."""
        return self.checkpointed_bytes is not None and written.end_offset <= self.checkpointed_bytes

    def location(self) -> str:
        """Where it is: `trained`, `dropped:REASON`, `dead`, `outstanding:STAGE`, `lost` or `twice`."""
        if len(self.lines) + len(self.dead) + self.dropped_dead > 1:
            return "twice"
        if self.dead:
            return "dead"
        if self.dropped_dead:
            return "dropped:operator"
        if self.lines:
            return self._location_by_ledger(self.lines[0])
        if not self.entries:
            return "lost"
        if all(entry.marked for entry in self.entries):
            return "outstanding:marked"
        return f"outstanding:{max((entry.stage for entry in self.entries), key=_stage_order)}"

    def _location_by_ledger(self, written: LedgerLine) -> str:
        if self.checkpointed_bytes is None or self.is_checkpointed(written) or self.entries:
            return encode_outcome(written.record.outcome)
        # What a server that lost its last writes, or all of them, has not fed again yet.
        return "lost" if self.fed or self.unfinished else "outstanding:again"

    def describe(self) -> list[str]:
        """It in words."""
        told = [
            f"ledger line {w.number}: {encode_outcome(w.record.outcome)} in step {w.record.step}, version {w.record.version}"
            + ("" if self.is_checkpointed(w) else ", which no checkpoint holds")
            for w in self.lines
        ]
        told += [f"dead letter {d.id} of {d.stage}: {d.reason}: {d.error[:_MAX_ERROR_CHARS]}" for d in self.dead]
        told += ["its dead letter was dropped by the operator"] if self.dropped_dead else []
        told += [f"entry {e.id} in {e.stage}{', marked' if e.marked else ''}" for e in self.entries]
        if not self.entries:
            told.append(
                "unfinished on the server, which has no entry of it" if self.unfinished else "no entry on the server"
            )
        return told


def _stage_order(stage: str) -> int:
    return STAGES.index(stage) if stage in STAGES else -1


def _group_by_prompt(items: Iterable[T], prompt: Callable[[T], str]) -> dict[str, list[T]]:
    found: defaultdict[str, list[T]] = defaultdict(list)
    for item in items:
        found[prompt(item)].append(item)
    return found


def _count_details(places: Counter[str], what: str) -> dict[str, int]:
    """`what:DETAIL` by detail."""
    return {name.partition(":")[2]: n for name, n in sorted(places.items()) if name.startswith(f"{what}:")}
