"""What reward functions logged, and which answers they could not judge, for the metrics of a step."""

from collections import Counter
from typing import Final

from stream.records import Group
from stream.validity import Measured

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
