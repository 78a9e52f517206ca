"""Decides whether a scored group is worth training on, and counts the groups that are not."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stream.records import Group, TrainedCompletion
from stream.trainer.leased_group import DroppedGroup
from stream.validity import DropReason
from workers.runs.progress import Progress
from workers.settings import Settings
from workers.train.groups.failure_causes import failure_causes
from workers.train.groups.no_loss_monitor import NoLossMonitor
from workers.train.groups.reward_log import RewardLog
from workers.train.step.group_checks import CheckedGroup, GroupRewards, check_group, unusable_greedy
from workers.train.training_warnings import TrainingWarnings

_FILTERED_STEPS = 4
"""Number of steps' worth of dropped groups whose rewards are kept for the next step's metrics."""


class DroppedGroups(NamedTuple):
    """Groups that were dropped on the way to a step."""

    reasons: dict[DropReason, int]
    """Number of groups by reason."""
    rewards: list[GroupRewards]
    """Of the last of them."""
    counters: Counter[str]
    """Their completions by the names of step metrics: `rows/STATE`, where `valid` is one that had no fault of its own,
    and `truncated/REASON`."""


class GroupChecker:
    """Checks each new group once; `check` is the consumer's.

    Args:
        settings: of the run.
        vocab_size: number of token ids that the model knows.
        progress: counts the completions of dropped groups.
    """

    def __init__(self, settings: Settings, vocab_size: int, progress: Progress) -> None:
        self._settings = settings
        self._vocab_size = vocab_size
        self._progress = progress
        self._monitor = NoLossMonitor(settings.abort.max_invalid_fraction, settings.abort_window_groups)
        self._reward_log = RewardLog()
        self.pop_logged = self._reward_log.pop
        self.warnings = TrainingWarnings(settings, progress.step)
        self._dropped: Counter[DropReason] = Counter()
        self._counters: Counter[str] = Counter()
        self._filtered: deque[GroupRewards] = deque(maxlen=_FILTERED_STEPS * settings.train.batch_size)

    def check(self, group: Group, version: int) -> CheckedGroup | DroppedGroup:
        """Return the collated group, or `DroppedGroup` if it is not worth training on at this policy version.

        Raises:
            RecordError: the group cannot be trained on as it is.
            RunFailedError: the group is dropped, and too many completions bear no loss (`NoLossMonitor`).
        """
        checked = check_group(group, self._settings, version, self._vocab_size)
        self._reward_log.observe(group)
        if checked.drop_reason is None:
            return checked
        self._observe(group, checked.no_loss)
        self._progress.totals.add(group)
        self.warnings.observe_group(group)
        self._dropped[checked.drop_reason] += 1
        self._filtered.append(checked.rewards)
        self._progress.count_states(Counter(checked.states))
        self._counters.update(f"rows/{state}" for state in checked.states)
        self._counters.update(f"truncated/{c.truncated}" for c in group.completions if c.truncated and not c.greedy)
        states = (f"dropped:{checked.drop_reason}" if state == "valid" else state for state in checked.states)
        return DroppedGroup(checked.drop_reason, [TrainedCompletion(state, None, 0) for state in states])

    def observe_step(self, groups: Sequence[Group], no_loss: Mapping[str, Mapping[str, int]]) -> None:
        """Count completions that bore no loss in a step, where correction may have rejected more than `check` did.

        Args:
            groups: of the step.
            no_loss: by prompt id and reason (`StepReport.no_loss`).

        Raises:
            RunFailedError: too many completions bear no loss for one reason.
        """
        for group in groups:
            self._progress.totals.add(group)
            self.warnings.observe_group(group)
            self._observe(group, no_loss.get(group.prompt.id, {}))

    def pop_dropped(self) -> DroppedGroups:
        """Return the groups dropped since the previous call."""
        dropped = DroppedGroups(dict(self._dropped), list(self._filtered), self._counters)
        self._dropped, self._counters = Counter(), Counter()
        self._filtered.clear()
        return dropped

    def _observe(self, group: Group, no_loss: Mapping[str, int]) -> None:
        counts = Counter(no_loss)
        counts.update(unusable_greedy(group, self._settings))
        causes = failure_causes(group)
        self._progress.causes.update(causes)
        self._monitor.observe(group.prompt.environment, len(group.completions), counts, causes)
