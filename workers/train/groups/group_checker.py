"""Decides whether a scored group is worth training on, and counts the groups that are not.

For the metrics and messages of a step it keeps what dropped groups earned, the first exception behind each reason, what
reward functions logged, and which answers they could not judge.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from stream.causes import ErrorCause
from stream.records import Completion, Failure, Group, RewardPart, TrainedCompletion
from stream.trainer.leased_group import DroppedGroup
from stream.validity import DropReason, Measured, Unmeasured
from workers.runs.progress import Progress
from workers.settings import Settings
from workers.train.groups.invalid_fraction_monitor import InvalidFractionMonitor
from workers.train.step.group_checks import CheckedGroup, GroupRewards, check_group, unusable_greedy
from workers.train.training_warnings import TrainingWarnings

_FILTERED_STEPS = 4
"""Number of steps' worth of dropped groups whose rewards are kept for the next step's metrics."""


class DroppedGroups(NamedTuple):
    """Groups that were dropped on the way to a step."""

    reasons: dict[DropReason, int]
    """Number of groups by reason."""
    rewards: list[GroupRewards]
    """Rewards of the last of the groups."""
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
        self._monitor = InvalidFractionMonitor(settings.abort.max_invalid_fraction, settings.abort_window_groups)
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
            RunFailedError: the group is dropped, and too many completions bear no loss (`InvalidFractionMonitor`).
        """
        checked = check_group(group, self._settings, version, self._vocab_size)
        self._reward_log.observe(group)
        if checked.drop_reason is None:
            return checked
        self._observe(group, checked.without_loss)
        self._progress.totals.add(group)
        self.warnings.observe_group(group)
        self._dropped[checked.drop_reason] += 1
        self._filtered.append(checked.rewards)
        self._progress.count_states(Counter(checked.states))
        self._counters.update(f"rows/{state}" for state in checked.states)
        self._counters.update(f"truncated/{c.truncated}" for c in group.completions if c.truncated and not c.greedy)
        states = (f"dropped:{checked.drop_reason}" if state == "valid" else state for state in checked.states)
        return DroppedGroup(checked.drop_reason, [TrainedCompletion(state, None, 0) for state in states])

    def observe_step(self, groups: Sequence[Group], without_loss: Mapping[str, Mapping[str, int]]) -> None:
        """Count completions that bore no loss in a step, where correction may have rejected more than `check` did.

        Args:
            groups: of the step.
            without_loss: by prompt id and reason (`StepReport.without_loss`).

        Raises:
            RunFailedError: too many completions bear no loss for one reason.
        """
        for group in groups:
            self._progress.totals.add(group)
            self.warnings.observe_group(group)
            self._observe(group, without_loss.get(group.prompt.id, {}))

    def pop_dropped(self) -> DroppedGroups:
        """Return the groups dropped since the previous call."""
        dropped = DroppedGroups(dict(self._dropped), list(self._filtered), self._counters)
        self._dropped, self._counters = Counter(), Counter()
        self._filtered.clear()
        return dropped

    def _observe(self, group: Group, without_loss: Mapping[str, int]) -> None:
        counts = Counter(without_loss)
        counts.update(unusable_greedy(group, self._settings))
        causes = failure_causes(group)
        self._progress.causes.update(causes)
        self._monitor.observe(group.prompt.environment, len(group.completions), counts, causes)


TOOL_ERROR = "tool_error"
"""Key of the cause of a tool's error. The model reads such an error, and the completion stays valid."""


def failure_causes(group: Group) -> dict[str, ErrorCause]:
    """Return one cause for each state of the group's completions (`reward:raised`), and one for a tool's error."""
    causes: dict[str, ErrorCause] = {}
    for completion in group.completions:
        if completion.failure is not None:
            causes.setdefault(f"failed:{completion.failure.reason}", _failure_cause(completion.failure, group))
        elif isinstance(completion.reward, Unmeasured):
            causes.setdefault(f"reward:{completion.reward.reason}", _reward_cause(completion, completion.reward, group))
        for run in completion.tool_runs:
            if run.cause is not None:
                causes.setdefault(TOOL_ERROR, run.cause)
    return causes


def _failure_cause(failure: Failure, group: Group) -> ErrorCause:
    environment = group.prompt.environment
    source = f"environment {environment}" if environment else "rollout"
    return failure.cause or ErrorCause(exception=failure.detail or str(failure.reason), source=source)


def _reward_cause(completion: Completion, reward: Unmeasured, group: Group) -> ErrorCause:
    part = next((part for part in completion.parts if isinstance(part.reward, Unmeasured)), None)
    if part is None:
        return ErrorCause(exception=reward.detail or str(reward.reason), source="reward")
    return part_cause(part, group.prompt.environment)


def part_cause(part: RewardPart, environment: str | None) -> ErrorCause:
    """Return the cause of an unmeasured part of a reward, with the name of what should have measured it."""
    reward = part.reward
    is_own = part.name == "env" or part.name.startswith("env.")
    source = f"environment {environment}, get_reward" if is_own and environment else f"reward function {part.name}"
    if isinstance(reward, Unmeasured) and reward.cause is not None:
        return msgspec.structs.replace(reward.cause, source=source)
    detail = f"{reward.reason}: {reward.detail}" if isinstance(reward, Unmeasured) else ""
    return ErrorCause(exception=detail.rstrip(": "), source=source)


REWARD_LOG_METRICS: Final[dict[str, str]] = {
    "logged/*": "numbers that reward functions passed to `log_metric`: mean over all groups since the previous step",
    "reward/unjudged/*": "completions of these groups with the worst reward because the answer could not be judged, by "
    "reason",
}
"""Metrics over trained and dropped groups; the trainer adds them."""


class RewardLog:
    """Collects over groups, trained or dropped, until a step pops it."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}
        self._unjudged: Counter[str] = Counter()

    def observe(self, group: Group) -> None:
        """Add a group's logged numbers, and its rewards with a reason."""
        for name, values in group.logged_metrics.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = (total + sum(values), count + len(values))
        for completion in group.completions:
            if isinstance(completion.reward, Measured) and completion.reward.reason is not None:
                self._unjudged[completion.reward.reason] += 1

    def pop(self) -> dict[str, float]:
        """Return the metrics since the previous call: means of logged numbers, and counts of unjudged answers."""
        metrics = {f"logged/{name}": total / count for name, (total, count) in self._sums.items() if count}
        metrics |= {f"reward/unjudged/{reason}": float(count) for reason, count in self._unjudged.items()}
        self._sums, self._unjudged = {}, Counter()
        return metrics
