"""Which groups a step takes, and which it waits for, under `pacing.stale_policy = "wait"`.

A group begun at version s can be trained without being over age K (`max_staleness`) as long as the version is s + K at
most. With N groups trained for each version, so many more can be trained in time after this step::

    slots(s) = groups of the steps left in this version, this one excluded + N (s + K - version)

So a step has to take at least (outstanding groups begun at s or before) - slots(s) of those, for every s; where fewer
of them are in hand, it waits. To wait for those alone that the very next version makes too old is not enough: more may
come due at once than the step has room for.

It can always be done. Of n groups begun up to s, n <= slots(s) + what this step takes (B) holds when s is the present
version, because at most (K + 1) N are outstanding, those trained since the last publication included. A step that takes
what is asked for leaves n <= slots(s), which is the same inequality one step later. Whoever is claimed later is begun
later, or anew. And the oldest B in hand are, for every s, at least as many as asked for once all have come.
"""

from collections.abc import Collection, Mapping
from itertools import groupby

from msgspec import Struct


class VersionSchedule(Struct, frozen=True, kw_only=True):
    """Where training stands, and how fast versions come."""

    version: int
    """Now."""
    steps_left: int
    """Until the next is published, the one to come included."""
    groups_per_step: int
    groups_per_version: int
    max_staleness: int

    def slots_after(self, start_version: int) -> int:
        """Groups that may be trained after the step to come before those begun at this version are too old."""
        later_here = (self.steps_left - 1) * self.groups_per_step
        return later_here + (start_version + self.max_staleness - self.version) * self.groups_per_version

    def is_trainable(self, start_version: int) -> bool:
        """Whether a group begun at this version could be trained now without being too old."""
        return self.version - start_version <= self.max_staleness


class StepPlan(Struct, frozen=True):
    """What the step to come takes."""

    prompt_ids: list[str]
    """Prompts in hand; fewer than a step's where there are no more."""
    stragglers: list[str]
    """Prompts not in hand of which some ought to be in it, the longest under way first; where there are any, wait."""


def plan_step(
    start_versions: Mapping[str, int], buffered: Collection[str], abandoned: Collection[str], schedule: VersionSchedule
) -> StepPlan:
    """Choose what a step takes, and say what it ought to wait for.

    Args:
        start_versions: the policy version at which each outstanding group was begun, those in hand included.
        buffered: prompts that could be trained now.
        abandoned: prompts that are waited for no more.
        schedule: where training stands.

    What is too old already, or given up, has no claim on a place before others that are still in time, but before the
    rest, which may wait: so it makes nobody else late.
    """
    by_age = sorted(start_versions, key=lambda prompt: (start_versions[prompt], prompt))
    due = [prompt for prompt in by_age if schedule.is_trainable(start_versions[prompt]) and prompt not in abandoned]
    outstanding = here = most = 0
    lacking: int | None = None
    for start, group in groupby(due, key=start_versions.__getitem__):
        prompts = list(group)
        outstanding += len(prompts)
        here += sum(prompt in buffered for prompt in prompts)
        asked = min(outstanding - schedule.slots_after(start), schedule.groups_per_step)
        most = max(most, asked)
        if asked > here:
            lacking = start
    first = [prompt for prompt in due if prompt in buffered][:most]
    rest = [prompt for prompt in by_age if prompt in buffered and prompt not in set(first)]
    awaited = [p for p in due if p not in buffered and lacking is not None and start_versions[p] <= lacking]
    return StepPlan((first + rest)[: schedule.groups_per_step], awaited)
