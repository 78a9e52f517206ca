"""Which groups a step takes and which it waits for, with `pacing.stale_policy = "wait"`.

A group that started at version s can be trained within the staleness bound K (`max_staleness`) while the version is at
most s + K. With N groups trained per version, the number of groups that can still be trained in time after this step is

    slots(s) = groups of the remaining steps of this version, without this step, + N (s + K - version)

So for every s the step must take at least (outstanding groups that started at s or before) - slots(s) of those groups;
if fewer are buffered, it waits. Waiting only for groups that the very next version makes too old is not enough: more
may become due together than one step has room for.

A plan always exists. Let n be the number of groups that started up to s, and B the groups of a step. n <= slots(s) + B
holds when s is the current version, because at most (K + 1) N groups are outstanding, those trained since the last
publication included. A step that takes the required groups leaves n <= slots(s), the same inequality one step later.
Groups claimed later start later. And the oldest B buffered groups satisfy every s once all required groups have come.
"""

from collections.abc import Collection, Mapping
from itertools import groupby

from msgspec import Struct


class VersionSchedule(Struct, frozen=True, kw_only=True):
    """Where training is, and how many groups each version takes."""

    version: int
    """The current policy version."""
    steps_left: int
    """Steps until the next version is published, the coming one included."""
    groups_per_step: int
    groups_per_version: int
    max_staleness: int

    def slots_after(self, start_version: int) -> int:
        """Number of groups that can be trained after the coming step before groups of this version are too old."""
        rest_of_version = (self.steps_left - 1) * self.groups_per_step
        return rest_of_version + (start_version + self.max_staleness - self.version) * self.groups_per_version

    def is_trainable(self, start_version: int) -> bool:
        """Whether a group that started at this version is within the staleness bound now."""
        return self.version - start_version <= self.max_staleness


class StepPlan(Struct, frozen=True):
    """The coming step."""

    prompt_ids: list[str]
    """Buffered prompts that the step takes; fewer than a full step if there are no more."""
    stragglers: list[str]
    """Prompts not buffered of which some must be in the step, the longest in flight first; wait while there are any."""


def plan_step(
    start_versions: Mapping[str, int], buffered: Collection[str], abandoned: Collection[str], schedule: VersionSchedule
) -> StepPlan:
    """Choose the groups of the coming step and the stragglers that it must wait for.

    Args:
        start_versions: the policy version at which each outstanding group started, buffered groups included.
        buffered: prompts whose groups could be trained now.
        abandoned: prompts that are no longer waited for.
        schedule: where training is.

    Groups that must be in this step come first. All others follow by age, groups that are too old or abandoned
    included, so these never push a group over the bound.
    """
    by_age = sorted(start_versions, key=lambda prompt: (start_versions[prompt], prompt))
    eligible = [
        prompt for prompt in by_age if schedule.is_trainable(start_versions[prompt]) and prompt not in abandoned
    ]
    outstanding = arrived = required = 0
    short_of: int | None = None
    """Newest start version up to which more groups are required than have arrived."""
    for start_version, group in groupby(eligible, key=start_versions.__getitem__):
        prompts = list(group)
        outstanding += len(prompts)
        arrived += sum(prompt in buffered for prompt in prompts)
        needed = min(outstanding - schedule.slots_after(start_version), schedule.groups_per_step)
        required = max(required, needed)
        if needed > arrived:
            short_of = start_version
    first = [prompt for prompt in eligible if prompt in buffered][:required]
    rest = [prompt for prompt in by_age if prompt in buffered and prompt not in set(first)]
    stragglers = [
        prompt
        for prompt in eligible
        if prompt not in buffered and short_of is not None and start_versions[prompt] <= short_of
    ]
    return StepPlan((first + rest)[: schedule.groups_per_step], stragglers)
