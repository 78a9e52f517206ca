"""How many requests one engine gets at a time, driven by its own metrics.

A queue at the engine lowers the limit, but never below what the engine works on: an engine that has room is never the
reason to hold requests back. Memory that runs short lowers it further. Without a queue the limit doubles as long as
there is memory for that. Several workers use the same engine, and each counts only its own requests: each decreases in
proportion to these, and increases only while it has more requests to send.

An engine reports its load at `/metrics`, in Prometheus' text format under vLLM's names.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

_WAITING: Final = "vllm:num_requests_waiting"
_RUNNING: Final = "vllm:num_requests_running"
_KV_CACHE_USAGE: Final = "vllm:kv_cache_usage_perc"
_PREEMPTIONS: Final = "vllm:num_preemptions_total"
_TOKENS: Final = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
_NAMES: Final = (_WAITING, _RUNNING, _KV_CACHE_USAGE, _PREEMPTIONS, *_TOKENS)


class EngineMetrics(NamedTuple):
    """One poll of an engine. If a server reports several engine processes, these are the sums over them."""

    waiting: float
    """Requests of all clients that the engine has not started."""
    running: float
    """Requests of all clients that the engine is processing."""
    kv_cache_usage: float
    """Fraction of the KV cache in use, 0 to 1, in the fullest engine process; 0 if the engine does not report it."""
    preemptions: float
    """Requests preempted for lack of KV cache, since the engine started."""
    tokens: float | None
    """Tokens read and sampled since the engine started; None if the engine does not report them."""


def parse_metrics(text: str) -> EngineMetrics | None:
    """Parse the body of `/metrics`; None if it does not report waiting and running requests."""
    found: dict[str, list[float]] = {}
    for name, value in _samples(text):
        found.setdefault(name, []).append(value)
    if _WAITING not in found or _RUNNING not in found:
        return None
    tokens = [value for name in _TOKENS for value in found.get(name, ())]
    return EngineMetrics(
        waiting=sum(found[_WAITING]),
        running=sum(found[_RUNNING]),
        kv_cache_usage=max(found.get(_KV_CACHE_USAGE, [0.0])),
        preemptions=sum(found.get(_PREEMPTIONS, ())),
        tokens=sum(tokens) if tokens else None,
    )


def _samples(text: str) -> Iterator[tuple[str, float]]:
    """Yield name and value of each finite sample under one of the names above.

    Other lines are skipped first: parsing all of vLLM's 450 lines would take 16 ms on the event loop instead of 0.3 ms.
    """
    from prometheus_client.parser import text_string_to_metric_families

    for line in text.splitlines():
        if not line.startswith(_NAMES):
            continue
        try:
            samples = [sample for family in text_string_to_metric_families(line) for sample in family.samples]
        except ValueError:
            continue
        for sample in samples:
            if sample.name in _NAMES and math.isfinite(sample.value):
                yield sample.name, sample.value


MIN_CONCURRENCY: Final = 8
"""Requests that a rollout worker may always have at one engine."""
MAX_CONCURRENCY: Final = 512
"""Requests that a rollout worker may have at one engine at most."""
INCREASE: Final = 8
"""Fewest requests added to the limit after a poll that found room."""
DECREASE: Final = 0.8
"""Least part of the requests in flight that the limit still allows after a decrease."""
OVERLOADED_POLLS: Final = 2
"""Consecutive overloaded polls that lower the limit: a request that has just arrived also waits for a moment."""
QUEUE_FRACTION: Final = 0.1
"""Waiting requests allowed per running request; they keep the engine busy between two polls."""
ONLY_QUEUE_FRACTION: Final = 1.0
"""The same for a client's only engine: requests held back here would be served no sooner. Not unlimited, since they
wait within the time limit of their request there."""
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
        self, metrics: EngineMetrics, *, in_flight: int, has_waiting: bool, is_only: bool, minimum: int, maximum: int
    ) -> "AdaptiveLimit":
        """Return the limit after another poll.

        Args:
            metrics: what the engine reports.
            in_flight: requests of this client that the engine works on.
            has_waiting: other requests of this client could go to the engine.
            is_only: the client has no other engine for them.
            minimum: lowest limit.
            maximum: highest limit.
        """
        if self._made_no_progress(metrics):
            return replace(self, last_metrics=metrics)
        capacity = (1 + (ONLY_QUEUE_FRACTION if is_only else QUEUE_FRACTION)) * metrics.running
        total = metrics.running + metrics.waiting
        memory_short = metrics.kv_cache_usage > _KV_FULL
        overloaded = memory_short or total > max(metrics.running + 1, capacity)
        preempted = self.last_metrics is not None and metrics.preemptions > self.last_metrics.preemptions
        polls = self.overloaded_polls + 1 if overloaded else 0
        if preempted or polls >= OVERLOADED_POLLS:
            if in_flight > self.limit:  # the metrics cannot judge a limit that the load has not fallen to yet
                return AdaptiveLimit(self.limit, 0, metrics)
            kept = DECREASE if preempted or memory_short else max(DECREASE, capacity / total)
            return AdaptiveLimit(max(minimum, math.ceil(kept * in_flight)), 0, metrics)
        has_room = not overloaded and metrics.waiting == 0 and metrics.kv_cache_usage < _KV_FREE
        grows = has_room and has_waiting and in_flight >= self.limit
        return AdaptiveLimit(min(maximum, self.limit + (self._increase(metrics) if grows else 0)), polls, metrics)

    def _increase(self, metrics: EngineMetrics) -> int:
        """Return how many more requests an engine with room gets: as many again, or as the free memory is for."""
        room = min(1.0, (_KV_FREE - metrics.kv_cache_usage) / max(metrics.kv_cache_usage, 0.01))
        return max(INCREASE, int(room * self.limit))

    def _made_no_progress(self, metrics: EngineMetrics) -> bool:
        """The engine has requests but processed no token since the last poll; it may be paused for new weights."""
        if self.last_metrics is None or metrics.tokens is None or self.last_metrics.tokens is None:
            return False
        return metrics.tokens == self.last_metrics.tokens and metrics.running + metrics.waiting > 0
