"""Statistics of a served reward model, logged at intervals."""

import statistics
from collections import Counter

import structlog

from stream.validity import Measured, Reward

log = structlog.get_logger()


class ServiceStats:
    """Collects scores, latencies and errors, and logs them as `reward_model.served`."""

    def __init__(self) -> None:
        self._logged_retries = 0
        self._clear()

    def _clear(self) -> None:
        self._batch_sizes: list[int] = []
        self._latencies: list[float] = []
        self._scores: list[float] = []
        self._errors: Counter[str] = Counter()

    def record_batch(self, size: int) -> None:
        """Count a batch of `size` conversations."""
        self._batch_sizes.append(size)

    def record(self, reward: Reward, latency_s: float) -> None:
        """Count the final result of one conversation, and its latency including retries."""
        self._latencies.append(latency_s)
        if isinstance(reward, Measured):
            self._scores.append(reward.value)
        else:
            self._errors[reward.reason] += 1

    def log_and_reset(self, total_retries: int) -> None:
        """Log the statistics since the last call; log nothing if no conversation was scored.

        Args:
            total_retries: retries since the client was opened.
        """
        if not self._latencies:
            return
        log.info(
            "reward_model.served",
            scored=len(self._scores),
            errors=dict(self._errors),
            retries=total_retries - self._logged_retries,
            score_mean=_rounded(statistics.fmean(self._scores) if self._scores else None),
            score_std=_rounded(statistics.stdev(self._scores) if len(self._scores) > 1 else None),
            score_min=_rounded(min(self._scores, default=None)),
            score_max=_rounded(max(self._scores, default=None)),
            latency_mean_s=_rounded(statistics.fmean(self._latencies)),
            latency_max_s=_rounded(max(self._latencies)),
            batch_mean=_rounded(statistics.fmean(self._batch_sizes) if self._batch_sizes else None),
            batch_max=max(self._batch_sizes, default=None),
        )
        self._logged_retries = total_retries
        self._clear()


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
