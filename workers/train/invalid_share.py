"""Watches for completions that become invalid while the reward rises: a policy may have found a way to be left out.

What cannot be measured is left out of the mean reward, so a policy that fails to be measured where it would have lost
looks better. The share of completions without a reward that counts, and the mean of those that do, are compared for
each environment: its first groups against its last ones.
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
"""Groups of an environment that are compared, at least."""
MIN_RISE: Final = 0.05
"""How much the share must rise at least, so that a rare failure is no warning."""
MIN_SHARE_ERRORS: Final = 4.0
MIN_REWARD_ERRORS: Final = 2.0
"""How many standard errors, of groups, a rise must exceed: a run looks at hundreds of windows."""


class _GroupShare(NamedTuple):
    """One group."""

    completions: int
    invalid: Counter[str]
    """Completions without a reward that counts, by reason."""
    reward: float | None
    """Mean of the others; None if there is none."""

    @property
    def share(self) -> float:
        return self.invalid.total() / self.completions


class _Rise(NamedTuple):
    before: float
    now: float
    errors: float
    """The difference in standard errors."""

    @classmethod
    def between(cls, before: Sequence[float], now: Sequence[float]) -> "_Rise | None":
        """Return the rise of a mean over groups; None if it does not rise, or is not known."""
        if len(before) < 2 or len(now) < 2:
            return None
        one, two = fmean(before), fmean(now)
        if two <= one:
            return None
        error = math.sqrt(variance(before) / len(before) + variance(now) / len(now))
        return cls(one, two, (two - one) / error if error else math.inf)


class InvalidShares:
    """Compares the first groups of each environment with its last ones.

    Args:
        settings: of the run.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._window = max(MIN_GROUPS, settings.abort_window_groups)
        self._first: dict[str, list[_GroupShare]] = {}
        self._last: dict[str, deque[_GroupShare]] = {}

    def add(self, group: Group) -> None:
        """Count one group, trained or dropped."""
        completions = [each for each in group.completions if not each.greedy]
        if not completions:
            return
        reasons = Counter(reason for each in completions if (reason := self._reason(each)))
        rewards = [
            each.reward.value for each in completions if isinstance(each.reward, Measured) and not self._reason(each)
        ]
        counted = _GroupShare(len(completions), reasons, fmean(rewards) if rewards else None)
        environment = group.prompt.environment or ""
        first = self._first.setdefault(environment, [])
        if len(first) < self._window:
            first.append(counted)
        else:
            self._last.setdefault(environment, deque(maxlen=self._window)).append(counted)

    def texts(self) -> dict[str, str]:
        """Return the text of the warning for each environment; empty if there is no trouble."""
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
        of = f"environment {environment}" if environment else "the run"
        return (
            f"the share of completions of {of} without a reward that counts rose from {share.before:.1%} to "
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
    """Return the share of each reason."""
    completions = sum(group.completions for group in groups)
    counts = sum((group.invalid for group in groups), Counter[str]())
    return {reason: count / completions for reason, count in counts.items()}
