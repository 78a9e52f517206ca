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

from stream.census import Census, Died, Entry
from stream.keys import STAGES
from stream.ledger import Written

T = TypeVar("T")

_ERROR = 200
"""Characters of a dead letter's error that are told."""


class Facts(Struct, kw_only=True):
    """What an audit judges."""

    fed: AbstractSet[str]
    """The prompts that the feeder has passed, by its cursor. Those seen elsewhere need not be among them."""
    lines: Sequence[Written]
    """The ledger."""
    kept: int | None
    """Bytes of it that the newest checkpoint holds; None where nobody knows: then no line is doubted."""
    census: Census = field(default_factory=Census)


class Finding(Struct, frozen=True):
    """A prompt that is lost, or counted twice."""

    prompt: str
    known: list[str]
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


def audit(facts: Facts) -> AuditReport:
    """Say of each prompt where it ended, or is."""
    census = facts.census
    lines = _by(facts.lines, lambda written: written.line.prompt)
    dead = _by((letter for letter in census.dead if letter.fed), lambda letter: letter.prompt)
    entries = _by(census.entries, lambda entry: entry.prompt)
    places: Counter[str] = Counter()
    suspects: dict[str, list[Finding]] = {"lost": [], "twice": []}
    unsaved = 0
    prompts = facts.fed | census.open | lines.keys() | dead.keys() | census.removed
    for prompt in prompts:
        known = _Known(
            lines=lines.get(prompt, []),
            dead=dead.get(prompt, []),
            removed=prompt in census.removed,
            entries=entries.get(prompt, []),
            open=prompt in census.open,
            passed=prompt in facts.fed,
            kept=facts.kept,
        )
        place = known.place()
        places[place] += 1
        unsaved += any(not known.saved(written) for written in known.lines) and place.startswith(("trained", "dropped"))
        if place in suspects:
            suspects[place].append(Finding(prompt, known.told()))
    lost, twice = (sorted(suspects[name], key=lambda finding: finding.prompt) for name in ("lost", "twice"))
    return AuditReport(
        fed=len(prompts),
        trained=places["trained"],
        dropped=_within(places, "dropped"),
        dead=places["dead"],
        outstanding=_within(places, "outstanding"),
        lost=lost,
        twice=twice,
        clean=not lost and not twice,
        unsaved=unsaved,
        junk=sum(entry.prompt not in prompts for entry in census.entries)
        + sum(not letter.fed for letter in census.dead),
    )


class _Known(Struct, kw_only=True):
    """Everything known of one prompt."""

    lines: list[Written]
    dead: list[Died]
    removed: bool
    entries: list[Entry]
    open: bool
    passed: bool
    kept: int | None

    def saved(self, written: Written) -> bool:
        """Whether a checkpoint holds this line."""
        return self.kept is not None and written.upto <= self.kept

    def place(self) -> str:
        """Where it is: `trained`, `dropped:REASON`, `dead`, `outstanding:STAGE`, `lost` or `twice`."""
        if len(self.lines) + len(self.dead) + self.removed > 1:
            return "twice"
        if self.dead:
            return "dead"
        if self.removed:
            return "dropped:operator"
        if self.lines:
            return self._by_ledger(self.lines[0])
        if not self.entries:
            return "lost"
        if all(entry.marked for entry in self.entries):
            return "outstanding:marked"
        return f"outstanding:{max((entry.stage for entry in self.entries), key=_order)}"

    def _by_ledger(self, written: Written) -> str:
        if self.kept is None or self.saved(written) or self.entries:
            return written.line.end
        # What a server that lost its last writes, or all of them, has not fed again yet.
        return "lost" if self.passed or self.open else "outstanding:again"

    def told(self) -> list[str]:
        """It in words."""
        told = [
            f"ledger line {w.number}: {w.line.end} in step {w.line.step}, version {w.line.version}"
            + ("" if self.saved(w) else ", which no checkpoint holds")
            for w in self.lines
        ]
        told += [f"dead letter {d.id} of {d.stage}: {d.reason}: {d.error[:_ERROR]}" for d in self.dead]
        told += ["its dead letter was dropped by the operator"] if self.removed else []
        told += [f"entry {e.id} in {e.stage}{', marked' if e.marked else ''}" for e in self.entries]
        if not self.entries:
            told.append("open on the server, which has no entry of it" if self.open else "no entry on the server")
        return told


def _order(stage: str) -> int:
    return STAGES.index(stage) if stage in STAGES else -1


def _by(items: Iterable[T], prompt: Callable[[T], str]) -> dict[str, list[T]]:
    found: defaultdict[str, list[T]] = defaultdict(list)
    for item in items:
        found[prompt(item)].append(item)
    return found


def _within(places: Counter[str], what: str) -> dict[str, int]:
    """`what:DETAIL` by detail."""
    return {name.partition(":")[2]: n for name, n in sorted(places.items()) if name.startswith(f"{what}:")}
