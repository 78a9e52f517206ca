"""How many requests one engine is given at once: additive increase, multiplicative decrease, by its own figures.

Several workers see the same engine, and each counts only its own requests. So each gives way in proportion to what it
asks for itself, and takes more only while it has more to ask for.
"""

from dataclasses import dataclass, replace
from typing import Final

from workers.rollout.engine_client.engine_metrics import EngineMetrics

MIN_CONCURRENCY: Final = 8
"""Requests that a rollout worker may always have at one engine."""
MAX_CONCURRENCY: Final = 512
"""Requests that a rollout worker may have at one engine at most."""
INCREASE: Final = 8
"""Requests more, at a look."""
DECREASE: Final = 0.8
OVERLOADED_POLLS: Final = 2
"""Looks in a row at a crowded engine: a request that has only just arrived waits for a moment, too."""
_QUEUE_FRACTION: Final = 0.1
"""Requests that may wait at the engine, as a part of those that run: they keep it busy between two looks."""
_KV_FULL, _KV_FREE = 0.95, 0.9
"""Use of the KV cache above which fewer, and below which more requests are given."""


@dataclass(frozen=True, slots=True)
class AdaptiveLimit:
    """What is known of an engine's room."""

    limit: int
    """Requests of ours that it may work on."""
    overloaded_polls: int = 0
    """Looks in a row at which it was crowded."""
    last_metrics: EngineMetrics | None = None
    """The last look."""

    def updated(
        self, metrics: EngineMetrics, *, in_flight: int, has_waiting: bool, minimum: int, maximum: int
    ) -> "AdaptiveLimit":
        """What is known after another look.

        Args:
            metrics: what the engine says of itself.
            in_flight: requests of ours that it works on.
            has_waiting: other requests of ours could be given to it.
            minimum: the lowest limit.
            maximum: the highest limit.
        """
        if self._made_no_progress(metrics):
            return replace(self, last_metrics=metrics)
        overloaded = metrics.waiting > max(1.0, _QUEUE_FRACTION * metrics.running) or metrics.kv_cache_usage > _KV_FULL
        preempted = self.last_metrics is not None and metrics.preemptions > self.last_metrics.preemptions
        polls = self.overloaded_polls + 1 if overloaded else 0
        if preempted or polls >= OVERLOADED_POLLS:
            # Until there are as few as asked for, the engine cannot say whether these are few enough.
            limit = self.limit if in_flight > self.limit else max(minimum, int(DECREASE * in_flight))
            return AdaptiveLimit(limit, 0, metrics)
        underloaded = not overloaded and metrics.waiting == 0 and metrics.kv_cache_usage < _KV_FREE
        increase = INCREASE if underloaded and has_waiting and in_flight >= self.limit else 0
        return AdaptiveLimit(min(maximum, self.limit + increase), polls, metrics)

    def _made_no_progress(self, metrics: EngineMetrics) -> bool:
        """Whether it did nothing since the last look, paused for new weights for instance: who waits tells nothing."""
        if self.last_metrics is None or metrics.tokens is None or self.last_metrics.tokens is None:
            return False
        return metrics.tokens == self.last_metrics.tokens and metrics.running + metrics.waiting > 0
