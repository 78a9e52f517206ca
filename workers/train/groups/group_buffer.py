"""The groups in the trainer's hand: claimed, judged worth training, waiting for a step to be full."""

from collections import Counter, deque
from collections.abc import Collection

import structlog
from msgspec import Struct, field

from stream.errors import NewerSchemaError, RecordError
from stream.queue.stage import Lease
from stream.records import Group
from stream.trainer.ledger import Ledger
from stream.validity import DropReason
from workers.settings import Settings
from workers.train.groups.invalid_reward_monitor import InvalidRewardMonitor
from workers.train.step.selection import check_group

log = structlog.get_logger()

_FILTERED_STEPS = 4
"""Dropped groups kept for the next step's metrics, in batches; the policy earned their rewards as well."""


class Decision(Struct, kw_only=True):
    """What becomes of one entry. Without any of these it is in hand."""

    group: Group | None = None
    outcome: str = ""
    """`dropped:REASON`; `again:END` where the ledger holds that end already."""
    replaced: Lease | None = None
    """An older copy that it takes the place of; whatever becomes of this one, the older one ends as its twin."""
    completion_states: Counter[str] = field(default_factory=Counter)
    """Completions by state, where the group is dropped."""
    unreadable: str = ""
    unknown_schema: str = ""


class GroupBuffer:
    """Groups in hand, by prompt id.

    Args:
        settings: of the run.
        ledger: what has ended already.
        vocab_size: number of token ids that the model knows.
    """

    def __init__(self, settings: Settings, ledger: Ledger, vocab_size: int) -> None:
        self.groups: dict[str, tuple[Lease, Group]] = {}
        self._settings = settings
        self._ledger = ledger
        self._vocab_size = vocab_size
        self._invalid_reward_monitor = InvalidRewardMonitor(
            settings.abort.max_invalid_fraction, settings.abort_window_groups
        )
        self._dropped: Counter[DropReason] = Counter()
        self._filtered: deque[Group] = deque(maxlen=_FILTERED_STEPS * settings.train.batch_size)

    def offer(self, lease: Lease, version: int) -> Decision:
        """Take an entry into hand, or say what becomes of it.

        Raises:
            RunFailedError: too many completions are invalid for one reason (`Guard`).
        """
        try:
            group = lease.group()
            reason, states = check_group(group, self._settings, version, self._vocab_size)
        except NewerSchemaError as error:
            return Decision(unknown_schema=str(error))
        except RecordError as error:
            return Decision(unreadable=str(error))
        prompt = group.prompt.id
        if prompt in self._ledger.outcomes:
            return Decision(outcome=f"already:{self._ledger.outcomes[prompt]}")
        if prompt in self.groups and self.groups[prompt][0].id == lease.id:
            # Ours ran out, while we were suspended or the network was away, and we were the next to claim it.
            self.groups[prompt] = (lease, group)
            return Decision()
        # The younger copy is the one that the server knows for certain: one that lost its last writes may have
        # forgotten the other.
        older, _ = self.groups.pop(prompt, (None, None))
        if older is not None:
            log.warning("group.duplicate", prompt=prompt)
        self._invalid_reward_monitor.observe(group)
        if reason is not None:
            self._dropped[reason] += 1
            self._filtered.append(group)
            return Decision(group=group, outcome=f"dropped:{reason}", completion_states=states, replaced=older)
        self.groups[prompt] = (lease, group)
        return Decision(replaced=older)

    def pop(self, prompts: Collection[str] | None = None) -> tuple[list[Lease], list[Group]]:
        """Take these groups out of the hand, or all, in the order of prompt ids: who was faster must not matter."""
        dealt = [self.groups.pop(prompt) for prompt in sorted(self.groups if prompts is None else prompts)]
        return [lease for lease, _ in dealt], [group for _, group in dealt]

    def pop_dropped(self) -> tuple[dict[DropReason, int], list[Group]]:
        """Groups dropped since this was last asked: how many by reason, and the last of them."""
        counts, self._dropped = dict(self._dropped), Counter()
        groups = list(self._filtered)
        self._filtered.clear()
        return counts, groups

    def clear(self) -> list[Lease]:
        """Empty the hand without training; the leases are to be given back."""
        leases = [lease for lease, _ in self.groups.values()]
        self.groups.clear()
        return leases
