"""What a served reward model did, between two log events."""

import statistics
from collections import Counter

import structlog

from stream.validity import Measured, Reward

log = structlog.get_logger()


class ServiceStats:
    """Counts since the last event."""

    def __init__(self) -> None:
        self._logged_retries = 0
        """Of all time, when the last event was written."""
        self._clear()

    def _clear(self) -> None:
        self.batch_sizes: list[int] = []
        """Conversations of each batch."""
        self._latencies: list[float] = []
        self._scores: list[float] = []
        self._errors: Counter[str] = Counter()

    def record(self, reward: Reward, latency_s: float) -> None:
        """A conversation was answered, after retries."""
        self._latencies.append(latency_s)
        if isinstance(reward, Measured):
            self._scores.append(reward.value)
        else:
            self._errors[reward.reason] += 1

    def log_and_reset(self, retries: int) -> None:
        """Write the event, where there is anything to tell, and begin anew.

        Args:
            retries: tries after the first, of all time.
        """
        if not self._latencies:
            return
        log.info(
            "reward_model.served",
            scored=len(self._scores),
            errors=dict(self._errors),
            retries=retries - self._logged_retries,
            score_mean=_rounded(statistics.fmean(self._scores) if self._scores else None),
            score_std=_rounded(statistics.stdev(self._scores) if len(self._scores) > 1 else None),
            score_min=_rounded(min(self._scores, default=None)),
            score_max=_rounded(max(self._scores, default=None)),
            latency_mean_s=_rounded(statistics.fmean(self._latencies)),
            latency_max_s=_rounded(max(self._latencies)),
            batch_mean=_rounded(statistics.fmean(self.batch_sizes) if self.batch_sizes else None),
            batch_max=max(self.batch_sizes, default=None),
        )
        self._logged_retries = retries
        self._clear()


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
