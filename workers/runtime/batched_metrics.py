"""Prometheus metrics for what happens thousands of times per second: they keep the values, and count many together.

Values that are counted together take a fraction of the time: between two that are counted alone, other work removes the
metric's code and data from the processor's caches.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric
from prometheus_client.metrics import MetricWrapperBase

_TOGETHER: Final = 64
"""Values that are kept, at most."""


class _Batched(MetricWrapperBase):
    """A metric without labels that keeps values until there are many, or until it is read."""

    _uncounted: deque[float]

    def add(self, value: float) -> None:
        """Count a value, now or later. Only one thread may call this."""
        self._uncounted.append(value)
        if len(self._uncounted) >= _TOGETHER:
            self._count()

    def collect(self) -> Iterable[Metric]:
        """Return the metric; a registry calls this in any thread."""
        self._count()
        return super().collect()

    def _count(self) -> None:
        with suppress(IndexError):
            while True:
                self._count_one(self._uncounted.popleft())

    @abstractmethod
    def _count_one(self, value: float) -> None:
        """Count a value now."""


class BatchedCounter(_Batched, Counter):
    """A counter of what `add` is given."""

    def __init__(self, name: str, documentation: str, *, registry: CollectorRegistry) -> None:
        self._uncounted = deque()
        super().__init__(name, documentation, registry=registry)

    def _count_one(self, value: float) -> None:
        self.inc(value)


class BatchedHistogram(_Batched, Histogram):
    """A histogram of what `add` is given."""

    def __init__(self, name: str, documentation: str, *, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        self._uncounted = deque()
        super().__init__(name, documentation, buckets=buckets, registry=registry)

    def _count_one(self, value: float) -> None:
        self.observe(value)
