"""Watches for completions that become invalid while the reward rises: a policy may have found a way to be left out.

The mean reward leaves out completions whose reward was not measured. A policy therefore looks better if it learns to
make its bad completions unmeasurable. For each environment two figures of its first groups are compared with those of
its last groups: the share of completions without a reward that counts, and the mean reward of the others.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from statistics import fmean, variance
from typing import Final, NamedTuple

from stream.records import Completion, Group
from stream.validity import Measured
from workers.settings import Settings

MIN_GROUPS: Final = 16
"""Minimum number of first groups, and of last groups, of an environment that are compared."""
MIN_RISE: Final = 0.05
"""Smallest rise of the share that is a warning; rare failures stay below it."""
MIN_SHARE_ERRORS: Final = 4.0
MIN_REWARD_ERRORS: Final = 2.0
"""Standard errors over groups by which share and mean reward must rise; many, as a run compares hundreds of windows."""


class _GroupShare(NamedTuple):
    """The invalid completions of one group, and the mean reward of its others."""

    completions: int
    invalid: Counter[str]
    """Completions without a reward that counts, by reason."""
    reward: float | None
    """Mean reward of the other completions; None if there are none."""

    @property
    def share(self) -> float:
        return self.invalid.total() / self.completions


class _Rise(NamedTuple):
    """A mean that is higher in the last groups than in the first ones."""

    before: float
    now: float
    errors: float
    """The rise in standard errors."""

    @classmethod
    def between(cls, before: Sequence[float], now: Sequence[float]) -> "_Rise | None":
        """Return the rise of the mean over groups; None if it does not rise, or if there are fewer than two groups."""
        if len(before) < 2 or len(now) < 2:
            return None
        mean_before, mean_now = fmean(before), fmean(now)
        if mean_now <= mean_before:
            return None
        error = math.sqrt(variance(before) / len(before) + variance(now) / len(now))
        return cls(mean_before, mean_now, (mean_now - mean_before) / error if error else math.inf)


class InvalidShares:
    """Compares the first groups of each environment with its last ones.

    Args:
        settings: the run's settings.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._window = max(MIN_GROUPS, settings.abort_window_groups)
        self._first: dict[str, list[_GroupShare]] = {}
        self._last: dict[str, deque[_GroupShare]] = {}

    def add(self, group: Group) -> None:
        """Count one group, trained or dropped."""
        completions = [completion for completion in group.completions if not completion.greedy]
        if not completions:
            return
        reasons = Counter(reason for completion in completions if (reason := self._reason(completion)))
        rewards = [
            completion.reward.value
            for completion in completions
            if isinstance(completion.reward, Measured) and not self._reason(completion)
        ]
        counted = _GroupShare(len(completions), reasons, fmean(rewards) if rewards else None)
        environment = group.prompt.environment or ""
        first = self._first.setdefault(environment, [])
        if len(first) < self._window:
            first.append(counted)
        else:
            self._last.setdefault(environment, deque(maxlen=self._window)).append(counted)

    def texts(self) -> dict[str, str]:
        """Return the text of the warning for each environment; an empty text if there is nothing to warn of."""
        return {name: self._text(name, self._first[name], last) for name, last in self._last.items()}

    def _text(self, environment: str, first: Sequence[_GroupShare], last: Sequence[_GroupShare]) -> str:
        if len(last) < self._window:
            return ""
        share = _Rise.between([each.share for each in first], [each.share for each in last])
        reward = _Rise.between(_rewards(first), _rewards(last))
        if share is None or reward is None:
            return ""
        if share.now - share.before < MIN_RISE or share.errors < MIN_SHARE_ERRORS or reward.errors < MIN_REWARD_ERRORS:
            return ""
        before, now = _shares(first), _shares(last)
        reason = max(now, key=lambda name: now[name] - before.get(name, 0.0))
        where = f"environment {environment}" if environment else "the run"
        return (
            f"the share of completions of {where} without a reward that counts rose from {share.before:.1%} to "
            f"{share.now:.1%}, while the mean reward of the others rose from {reward.before:.3g} to {reward.now:.3g}. "
            f"{reason} grew most, from {before.get(reason, 0.0):.1%} to {now[reason]:.1%}: look at what these "
            "completions did (`penstock show --invalid`). What the model's own text causes must be measured"
        )

    def _reason(self, completion: Completion) -> str:
        """Return why a completion has no reward that counts, as in the metrics `rows/*`; empty if it has one."""
        if completion.failure is not None:
            return f"failed:{completion.failure.reason}"
        if not isinstance(completion.reward, Measured):
            return f"reward:{completion.reward.reason}" if completion.reward else ""
        cut = completion.truncated
        return f"truncated:{cut}" if cut and self._settings.truncation_policy(cut) == "exclude" else ""


def _rewards(groups: Iterable[_GroupShare]) -> list[float]:
    return [group.reward for group in groups if group.reward is not None]


def _shares(groups: Sequence[_GroupShare]) -> dict[str, float]:
    """Return for each reason its share of all completions."""
    completions = sum(group.completions for group in groups)
    counts = sum((group.invalid for group in groups), Counter[str]())
    return {reason: count / completions for reason, count in counts.items()}
