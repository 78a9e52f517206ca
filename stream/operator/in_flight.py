"""The groups that workers hold, and what each completion of them is doing."""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from stream.operator.run_status import RunStatus
from stream.queue.in_flight import ACTIVITY_TEXTS, CompletionInFlight, GroupInFlight


class OngoingActivity(NamedTuple):
    """What one completion is doing, or a group as a whole."""

    group: GroupInFlight
    completion: CompletionInFlight | None
    """None: the group as a whole does it."""
    activity: str
    since: float
    """Unix time in seconds."""

    @property
    def text(self) -> str:
        """The activity in words, with the names of tools or reward functions: `tool add`, `waiting for an engine`."""
        detail = self.group.detail if self.completion is None else self.completion.detail
        return f"{ACTIVITY_TEXTS.get(self.activity, self.activity)} {detail}".rstrip()


_DECODER = msgspec.json.Decoder(list[GroupInFlight])


def groups_in_flight(status: RunStatus) -> list[GroupInFlight]:
    """Return the groups of a status that was read with its workers' reports, the longest unchanged first.

    A group whose lease has ended since its worker's last report is left out; so is a report that cannot be read.
    """
    leases = {stage: frozenset(ids.split()) for stage, ids in status.leases.items()}
    found: dict[tuple[str, str], GroupInFlight] = {}
    for report in status.in_flight:
        try:
            groups = _DECODER.decode(report.groups)
        except ValueError:
            continue
        for group in groups:
            if group.entry in leases.get(report.stage, ()):
                group.stage, group.worker = report.stage, report.worker
                found[report.stage, group.entry] = group
    return sorted(found.values(), key=lambda group: (group.unchanged_since, group.prompt))


def ongoing_activities(groups: Iterable[GroupInFlight]) -> list[OngoingActivity]:
    """Return what each completion is doing, and each group as a whole, the longest unchanged first."""
    found = [
        OngoingActivity(group, each, each.activity, each.since or group.claimed_at)
        for group in groups
        for each in group.completions
    ]
    found += [
        OngoingActivity(group, None, group.activity, group.since or group.claimed_at)
        for group in groups
        if not group.completions
    ]
    return sorted(found, key=lambda each: each.since)
