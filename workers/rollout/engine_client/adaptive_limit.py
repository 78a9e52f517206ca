"""How many requests one engine gets at a time: additive increase, multiplicative decrease, driven by its own metrics.

Several workers use the same engine, and each counts only its own requests. Each decreases in proportion to its own
requests, and increases only while it has more requests to send.
"""

from dataclasses import dataclass, replace
from typing import Final

from workers.rollout.engine_client.engine_metrics import EngineMetrics

MIN_CONCURRENCY: Final = 8
"""Requests that a rollout worker may always have at one engine."""
MAX_CONCURRENCY: Final = 512
"""Requests that a rollout worker may have at one engine at most."""
INCREASE: Final = 8
"""Requests added to the limit after one poll."""
DECREASE: Final = 0.8
OVERLOADED_POLLS: Final = 2
"""Consecutive overloaded polls that lower the limit: a request that has just arrived also waits for a moment."""
_QUEUE_FRACTION: Final = 0.1
"""Waiting requests allowed per running request; they keep the engine busy between two polls."""
_KV_FULL, _KV_FREE = 0.95, 0.9
"""KV cache usage above which the limit falls, and below which it may rise."""


@dataclass(frozen=True, slots=True)
class AdaptiveLimit:
    """Upper bound on the requests that this client has in flight at one engine."""

    limit: int
    overloaded_polls: int = 0
    """Consecutive polls that found the engine overloaded."""
    last_metrics: EngineMetrics | None = None

    def updated(
        self, metrics: EngineMetrics, *, in_flight: int, has_waiting: bool, minimum: int, maximum: int
    ) -> "AdaptiveLimit":
        """Return the limit after another poll.

        Args:
            metrics: what the engine reports.
            in_flight: requests of this client that the engine works on.
            has_waiting: other requests of this client could go to the engine.
            minimum: lowest limit.
            maximum: highest limit.
        """
        if self._made_no_progress(metrics):
            return replace(self, last_metrics=metrics)
        overloaded = metrics.waiting > max(1.0, _QUEUE_FRACTION * metrics.running) or metrics.kv_cache_usage > _KV_FULL
        preempted = self.last_metrics is not None and metrics.preemptions > self.last_metrics.preemptions
        polls = self.overloaded_polls + 1 if overloaded else 0
        if preempted or polls >= OVERLOADED_POLLS:
            # Until no more requests are in flight than the limit allows, the metrics cannot judge that limit.
            limit = self.limit if in_flight > self.limit else max(minimum, int(DECREASE * in_flight))
            return AdaptiveLimit(limit, 0, metrics)
        underloaded = not overloaded and metrics.waiting == 0 and metrics.kv_cache_usage < _KV_FREE
        increase = INCREASE if underloaded and has_waiting and in_flight >= self.limit else 0
        return AdaptiveLimit(min(maximum, self.limit + increase), polls, metrics)

    def _made_no_progress(self, metrics: EngineMetrics) -> bool:
        """The engine has requests but processed no token since the last poll; it may be paused for new weights."""
        if self.last_metrics is None or metrics.tokens is None or self.last_metrics.tokens is None:
            return False
        return metrics.tokens == self.last_metrics.tokens and metrics.running + metrics.waiting > 0
