"""The groups in the trainer's hand: claimed, judged worth training, waiting for a step to be full."""

from collections import Counter, deque
from collections.abc import Collection

import structlog
from msgspec import Struct, field

from stream.errors import NewerSchemaError, RecordError
from stream.ledger import Ledger
from stream.records import Group
from stream.stage import Lease
from stream.validity import DropReason
from workers.settings import Settings
from workers.train.groups.guard import Guard
from workers.train.step.selection import assess

log = structlog.get_logger()

_FILTERED_KEPT = 4
"""Dropped groups kept for the next step's metrics, in batches; the policy earned their rewards as well."""


class Judgement(Struct, kw_only=True):
    """What becomes of one entry. Without any of these it is in hand."""

    group: Group | None = None
    ending: str = ""
    """`dropped:REASON`; `again:END` where the ledger holds that end already."""
    superseded: Lease | None = None
    """An older copy that it takes the place of; whatever becomes of this one, the older one ends as its twin."""
    states: Counter[str] = field(default_factory=Counter)
    """Completions by state, where the group is dropped."""
    unreadable: str = ""
    unknown_schema: str = ""


class Hand:
    """Groups in hand, by prompt id.

    Args:
        settings: of the run.
        ledger: what has ended already.
        vocabulary: number of token ids that the model knows.
    """

    def __init__(self, settings: Settings, ledger: Ledger, vocabulary: int) -> None:
        self.groups: dict[str, tuple[Lease, Group]] = {}
        self._settings = settings
        self._ledger = ledger
        self._vocabulary = vocabulary
        self._guard = Guard(settings.guard.max_invalid_fraction, settings.guard.window_groups)
        self._dropped: Counter[DropReason] = Counter()
        self._filtered: deque[Group] = deque(maxlen=_FILTERED_KEPT * settings.train.groups_per_step)

    def consider(self, lease: Lease, version: int) -> Judgement:
        """Take an entry into hand, or say what becomes of it.

        Raises:
            RunFailedError: too many completions are invalid for one reason (`Guard`).
        """
        try:
            group = lease.group()
            reason, states = assess(group, self._settings, version, self._vocabulary)
        except NewerSchemaError as error:
            return Judgement(unknown_schema=str(error))
        except RecordError as error:
            return Judgement(unreadable=str(error))
        prompt = group.prompt.id
        if prompt in self._ledger.ends:
            return Judgement(ending=f"again:{self._ledger.ends[prompt]}")
        if prompt in self.groups and self.groups[prompt][0].id == lease.id:
            # Ours ran out, while we were suspended or the network was away, and we were the next to claim it.
            self.groups[prompt] = (lease, group)
            return Judgement()
        # The younger copy is the one that the server knows for certain: one that lost its last writes may have
        # forgotten the other.
        older, _ = self.groups.pop(prompt, (None, None))
        if older is not None:
            log.warning("group.duplicate", prompt=prompt)
        self._guard.see(group)
        if reason is not None:
            self._dropped[reason] += 1
            self._filtered.append(group)
            return Judgement(group=group, ending=f"dropped:{reason}", states=states, superseded=older)
        self.groups[prompt] = (lease, group)
        return Judgement(superseded=older)

    def deal(self, prompts: Collection[str] | None = None) -> tuple[list[Lease], list[Group]]:
        """Take these groups out of the hand, or all, in the order of prompt ids: who was faster must not matter."""
        dealt = [self.groups.pop(prompt) for prompt in sorted(self.groups if prompts is None else prompts)]
        return [lease for lease, _ in dealt], [group for _, group in dealt]

    def dropped(self) -> tuple[dict[DropReason, int], list[Group]]:
        """Groups dropped since this was last asked: how many by reason, and the last of them."""
        counts, self._dropped = dict(self._dropped), Counter()
        groups = list(self._filtered)
        self._filtered.clear()
        return counts, groups

    def put_down(self) -> list[Lease]:
        """Empty the hand without training; the leases are to be given back."""
        leases = [lease for lease, _ in self.groups.values()]
        self.groups.clear()
        return leases
