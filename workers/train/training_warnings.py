"""Warnings while a run goes wrong: each rule is a function of the last groups, or of the metrics of steps.

=====================  ========================================================================================
`constant_rewards`     all rewards equal within every group of a window (4 x `train.batch_size` groups)
`all_truncated`        every completion cut off, over a batch of groups
`different_tasks`      completions of one group began with different prompts, in a tenth of a window of groups
`tool_errors`          more than half of the tool calls failed, over a window with 20 or more calls
`entropy_collapse`     mean entropy of 5 steps below a tenth of that of the run's first 5 steps
`too_stale`            mean staleness above `pacing.max_staleness` + 1, in 3 steps in a row
`ratio_out_of_range`   mean ratio outside [0.8, 1.25], or off-policy KL above 0.1, in 3 steps in a row
`kl_growth`            reference KL above 0.5, and rising faster and faster over three blocks of 5 steps
`reward_part_falls`    the mean reward of 5 steps is above that of the first 5, and one of its parts less than half
`invalid_share_rises`  of an environment's completions ever more are invalid, while the reward of the others rises
=====================  ========================================================================================

A rule warns when its condition becomes true, and again only after the condition has been false.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from stream.records import Group
from stream.validity import TruncationReason
from stream.wording import format_counts
from workers.runs.progress import GroupTotals
from workers.runs.warnings import TrainingWarning
from workers.settings import Settings
from workers.train.invalid_share import InvalidShares

INVALID_SHARE_RISES: Final = "invalid_share_rises"
BLOCK: Final = 5
"""Steps that are averaged."""
IN_A_ROW: Final = 3
"""Steps in a row in which a value must be out of range."""
MIN_TOOL_CALLS: Final = 20
MIN_TRUNCATED: Final = 8
"""Completions that `all_truncated` needs."""
MAX_ERROR_FRACTION: Final = 0.5
MIN_COMPARED_PROMPTS: Final = 4
"""Groups that `different_tasks` needs."""
MAX_DIFFERENT_FRACTION: Final = 0.1
"""Fraction of groups; not 0, since a template that writes the time changes a prompt now and then."""
ENTROPY_FRACTION: Final = 0.1
RATIO_RANGE: Final = (0.8, 1.25)
MAX_OFF_POLICY_KL: Final = 0.1
MIN_REFERENCE_KL: Final = 0.5
MIN_FALL_FRACTION: Final = 0.1
"""What a part must have lost, as a fraction of the reward's rise, so that a rare part's noise is no warning."""
_LIMITS: Final = {
    TruncationReason.LENGTH: "rollout.max_tokens_per_turn and rollout.max_tokens",
    TruncationReason.CONTEXT: "engine.max_model_len",
    TruncationReason.MAX_TURNS: "rollout.max_turns",
    TruncationReason.TOOL_CALLS: "rollout.max_tool_calls",
    TruncationReason.TOOL_ERRORS: "the tools' error messages, of which rollout.max_tool_calls allows half as many",
    TruncationReason.TOOL_TIME: "rollout.episode_timeout_s and rollout.call_timeout_s, and which tool is slow",
    TruncationReason.WALL_CLOCK: "rollout.episode_timeout_s, and what takes so long (`penstock queues --in-flight`)",
}
"""What cuts a completion off, by reason."""
_BLOCKS: Final = 3
_PART, _MEAN = "reward/part/", "/mean"

Metrics = Mapping[str, float]
GroupRule = Callable[[Sequence[GroupTotals], Settings], str]
"""(the last groups, one `GroupTotals` for each, settings) -> text of the warning, or nothing."""
StepRule = Callable[[Sequence[Metrics], Sequence[Metrics], Settings], str]
"""(metrics of the first steps, metrics of the last steps, settings) -> text of the warning, or nothing."""


class TrainingWarnings:
    """Applies the rules to every group and step.

    Args:
        settings: of the run.
        step: steps done so far.
    """

    def __init__(self, settings: Settings, step: int = 0) -> None:
        self._settings = settings
        self._step = step
        self._groups: deque[GroupTotals] = deque(maxlen=settings.abort_window_groups)
        self._first: list[Metrics] = []
        self._last: deque[Metrics] = deque(maxlen=_BLOCKS * BLOCK)
        self._invalid_shares = InvalidShares(settings)
        self._active: set[str] = set()
        self._quiet: Counter[str] = Counter()
        """How often a rule was applied since it last held, where an episode of trouble does not end at once."""
        self._pending: list[TrainingWarning] = []

    def observe_group(self, group: Group) -> None:
        """Apply the rules for groups to one more group, trained or dropped."""
        totals = GroupTotals()
        totals.add(group)
        self._groups.append(totals)
        self._invalid_shares.add(group)
        for name, rule in GROUP_RULES.items():
            text = rule(self._groups, self._settings)
            self._update_calmly(name, text, self._settings.abort_window_groups)

    def observe_step(self, step: int, metrics: Metrics) -> None:
        """Apply the rules for steps to one more step."""
        self._step = step
        if len(self._first) < BLOCK:
            self._first.append(metrics)
        self._last.append(metrics)
        for name, rule in STEP_RULES.items():
            self._update(name, rule(self._first, self._last, self._settings))
        for environment, text in self._invalid_shares.texts().items():
            self._update_calmly(INVALID_SHARE_RISES, text, BLOCK, environment)

    def pop(self) -> list[TrainingWarning]:
        """Return the warnings since the previous call."""
        pending, self._pending = self._pending, []
        return pending

    def _update_calmly(self, name: str, text: str, patience: int, subject: str = "") -> None:
        """Apply a rule whose episode of trouble ends when it has not held `patience` times in a row."""
        key = f"{name} {subject}"
        self._quiet[key] = 0 if text else self._quiet[key] + 1
        if text or self._quiet[key] >= patience:
            self._update(name, text, subject)

    def _update(self, name: str, text: str, subject: str = "") -> None:
        key = f"{name} {subject}"
        if not text:
            self._active.discard(key)
        elif key not in self._active:
            self._active.add(key)
            self._pending.append(TrainingWarning(name=name, text=text, step=self._step, time=time.time()))


def constant_rewards(groups: Sequence[GroupTotals], settings: Settings) -> str:
    """All rewards are equal within every group of the window."""
    window = settings.abort_window_groups
    if not settings.estimator.within_group or len(groups) < window or any(g.tied != 1 for g in groups):
        return ""
    values = sorted({group.tied_min for group in groups if group.tied_min is not None})
    shown = f"{values[0]}" if len(values) == 1 else f"from {values[0]} to {values[-1]}"
    return (
        f"the last {len(groups)} groups each had equal rewards ({shown}), so they teach nothing: look at a few "
        "completions (`penstock show`) and at the reward function"
    )


def all_truncated(groups: Sequence[GroupTotals], settings: Settings) -> str:
    """Every completion was cut off."""
    recent = list(groups)[-settings.train.batch_size :]
    completions = sum(group.completions for group in recent)
    if len(recent) < settings.train.batch_size or completions < MIN_TRUNCATED:
        return ""
    if sum(group.truncated for group in recent) < completions:
        return ""
    reasons: Counter[str] = Counter()
    for group in recent:
        reasons.update(group.truncated_by)
    shown = format_counts(dict(reasons.most_common()))
    limits = "; ".join(_LIMITS[TruncationReason(reason)] for reason, _ in reasons.most_common())
    return (
        f"all of the last {completions} completions were cut off ({shown}): see whether they would have ended "
        f"(`penstock show --end truncated`), and look at {limits}"
    )


def different_tasks(groups: Sequence[GroupTotals], settings: Settings) -> str:
    """Completions of one group began with different prompts, so they did not get the same task."""
    compared = sum(group.compared_prompts for group in groups)
    different = sum(group.different_prompts for group in groups)
    if not settings.estimator.compares_group or compared < max(MIN_COMPARED_PROMPTS, settings.train.batch_size):
        return ""
    if different <= MAX_DIFFERENT_FRACTION * compared:
        return ""
    return (
        f"in {different} of the last {compared} groups the completions began with different prompts, so the luck of "
        "the draw is taken for skill: a group compares completions of one task. Look at reset, which must draw the "
        "task from `seed` (`penstock check REF`), and at one group (`penstock show RUN --prompt ID`)"
    )


def tool_errors(groups: Sequence[GroupTotals], settings: Settings) -> str:  # noqa: ARG001
    """More than half of the tool calls failed."""
    errors = sum(group.tool_errors for group in groups)
    calls = max(errors, sum(group.tool_calls for group in groups))
    if calls < MIN_TOOL_CALLS or errors <= MAX_ERROR_FRACTION * calls:
        return ""
    return (
        f"{errors} of the last {calls} tool calls failed: look at the tools' messages (`penstock show --worst`), at "
        "their schemas (`penstock check REF`), and at model.tool_format"
    )


def entropy_collapse(first: Sequence[Metrics], last: Sequence[Metrics], settings: Settings) -> str:  # noqa: ARG001
    """The entropy has fallen to a fraction of its first values."""
    before, now = _block_mean(first, "entropy"), _block_mean(list(last)[-BLOCK:], "entropy")
    if before is None or now is None or now >= ENTROPY_FRACTION * before:
        return ""
    return (
        f"the entropy fell from {before:.3g} to {now:.3g} nats, so completions of a group become the same: look at "
        "train.learning_rate, at loss.clip_high, and at whether the reward can be earned by one phrase"
    )


def too_stale(first: Sequence[Metrics], last: Sequence[Metrics], settings: Settings) -> str:  # noqa: ARG001
    """Groups are older than the settings intend."""
    limit = settings.pacing.max_staleness + 1
    values = _recent(last, "staleness/mean")
    if not values or min(values) <= limit:
        return ""
    return (
        f"tokens are {values[-1]:.1f} versions old on average, more than pacing.max_staleness = "
        f"{settings.pacing.max_staleness} intends: look at pacing.stale_policy, and at episodes that take long "
        "(attempt/seconds)"
    )


def ratio_out_of_range(first: Sequence[Metrics], last: Sequence[Metrics], settings: Settings) -> str:  # noqa: ARG001
    """The policies of trainer and engine, or of one batch's updates, are far apart."""
    ratios, distances = _recent(last, "ratio/mean"), _recent(last, "correction/k3_kl")
    low, high = RATIO_RANGE
    if ratios and not any(low <= ratio <= high for ratio in ratios):
        return (
            f"the mean ratio is {ratios[-1]:.3g}, outside [{low}, {high}]: look at train.learning_rate and "
            "train.updates_per_batch"
        )
    if distances and min(distances) > MAX_OFF_POLICY_KL:
        return (
            f"trainer and engine differ by a KL of {distances[-1]:.3g} nats a token: look at staleness/mean, "
            "at model.dtype against the engine's, and at [correction]"
        )
    return ""


def kl_growth(first: Sequence[Metrics], last: Sequence[Metrics], settings: Settings) -> str:  # noqa: ARG001
    """The divergence from the reference policy grows faster and faster."""
    steps = list(last)
    if len(steps) < _BLOCKS * BLOCK:
        return ""
    one, two, three = (_block_mean(steps[i : i + BLOCK], "reference/kl") for i in range(0, len(steps), BLOCK))
    if one is None or two is None or three is None:
        return ""
    if not one < two < three or three - two < two - one or three <= MIN_REFERENCE_KL:
        return ""
    return (
        f"the KL to the reference policy grows faster and faster, from {one:.3g} to {three:.3g} nats a token within "
        f"{_BLOCKS * BLOCK} steps: look at algorithm.kl_coefficient, at train.learning_rate, and at whether "
        "completions still make sense (`penstock show`)"
    )


def reward_part_falls(first: Sequence[Metrics], last: Sequence[Metrics], settings: Settings) -> str:  # noqa: ARG001
    """The reward rises at the expense of one of its parts: the policy may have found a way to earn the wrong one."""
    recent = list(last)[-BLOCK:]
    rise = _change(first, recent, "reward/mean")
    names = {name for step in (*first, *recent) for name in step if name.startswith(_PART) and name.endswith(_MEAN)}
    changes = {name: change for name in sorted(names) if (change := _part_change(first, recent, name))}
    if rise is None or rise.size <= 0:
        return ""
    losses = [name for name in changes if _has_fallen(changes[name], rise) or _has_vanished(first, recent, name)]
    if not losses:
        return ""
    fallen = min(losses, key=lambda name: changes[name].size)
    risen = max(changes, key=lambda name: changes[name].size)
    return (
        f"the mean reward rose {rise}, while its part {_part(fallen)} fell {changes[fallen]} and {_part(risen)} rose "
        f"{changes[risen]}: look at what earns the most (`penstock show --best`), and at whether {_part(risen)} pays "
        "for what you want"
    )


class _Change(NamedTuple):
    before: float
    now: float

    @property
    def size(self) -> float:
        return self.now - self.before

    def __str__(self) -> str:
        return f"from {self.before:.3g} to {self.now:.3g}"


def _change(first: Sequence[Metrics], recent: Sequence[Metrics], name: str) -> _Change | None:
    """Return how far a metric has moved from the run's first block of steps to the last one; None if unknown."""
    before, now = _block_mean(first, name), _block_mean(recent, name)
    return None if before is None or now is None else _Change(before, now)


def _part_change(first: Sequence[Metrics], recent: Sequence[Metrics], name: str) -> _Change | None:
    """Return how far the mean of a part has moved; a part that no completion has any more is 0 now."""
    before = _block_mean(first, name)
    if before is not None and all(_value(step, name) is None for step in recent):
        return _Change(before, 0.0)
    return _change(first, recent, name)


def _has_fallen(part: _Change, rise: _Change) -> bool:
    """Return whether a part lost more than half, and that is not little beside the rise of the reward."""
    return part.before > 0 and part.now < part.before / 2 and -part.size >= MIN_FALL_FRACTION * rise.size


def _has_vanished(first: Sequence[Metrics], recent: Sequence[Metrics], name: str) -> bool:
    """Return whether a part was earned in each of the first steps and in none of the last, however little it is."""
    return all((_value(step, name) or 0) > 0 for step in first) and all(not _value(step, name) for step in recent)


def _part(metric: str) -> str:
    return metric.removeprefix(_PART).removesuffix(_MEAN)


GROUP_RULES: Final[dict[str, GroupRule]] = {
    "constant_rewards": constant_rewards,
    "all_truncated": all_truncated,
    "different_tasks": different_tasks,
    "tool_errors": tool_errors,
}
STEP_RULES: Final[dict[str, StepRule]] = {
    "entropy_collapse": entropy_collapse,
    "too_stale": too_stale,
    "ratio_out_of_range": ratio_out_of_range,
    "kl_growth": kl_growth,
    "reward_part_falls": reward_part_falls,
}


def _recent(last: Sequence[Metrics], name: str) -> list[float]:
    """Return a metric of the last steps; empty if one of them lacks it."""
    values = [value for metrics in list(last)[-IN_A_ROW:] if (value := _value(metrics, name)) is not None]
    return values if len(values) == IN_A_ROW else []


def _block_mean(steps: Sequence[Metrics], name: str) -> float | None:
    """Return the mean of a metric over a block of steps; None if one of them lacks it."""
    values = [value for metrics in steps if (value := _value(metrics, name)) is not None]
    return sum(values) / BLOCK if len(values) == BLOCK else None


def _value(metrics: Metrics, name: str) -> float | None:
    value = metrics.get(name)
    return float(value) if value is not None and math.isfinite(value) else None
