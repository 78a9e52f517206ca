"""How many requests one engine is given at once: additive increase, multiplicative decrease, by its own figures.

Several workers see the same engine, and each counts only its own requests. So each gives way in proportion to what it
asks for itself, and takes more only while it has more to ask for.
"""

from dataclasses import dataclass, replace
from typing import Final

from workers.rollout.engine.signals import Signals

STEP: Final = 8
"""Requests more, at a look."""
DECREASE: Final = 0.8
CROWDED_LOOKS: Final = 2
"""Looks in a row at a crowded engine: a request that has only just arrived waits for a moment, too."""
_QUEUE: Final = 0.1
"""Requests that may wait at the engine, as a part of those that run: they keep it busy between two looks."""
_FULL, _ROOMY = 0.95, 0.9
"""Use of the KV cache above which fewer, and below which more requests are given."""


@dataclass(frozen=True, slots=True)
class Concurrency:
    """What is known of an engine's room."""

    limit: int
    """Requests of ours that it may work on."""
    crowded: int = 0
    """Looks in a row at which it was crowded."""
    seen: Signals | None = None
    """The last look."""

    def after(self, signals: Signals, *, ours: int, queueing: bool, least: int, most: int) -> "Concurrency":
        """What is known after another look.

        Args:
            signals: what the engine says of itself.
            ours: requests of ours that it works on.
            queueing: other requests of ours could be given to it.
            least: the lowest limit.
            most: the highest limit.
        """
        if self._stood_still(signals):
            return replace(self, seen=signals)
        crowded = signals.waiting > max(1.0, _QUEUE * signals.running) or signals.kv_use > _FULL
        preempted = self.seen is not None and signals.preemptions > self.seen.preemptions
        looks = self.crowded + 1 if crowded else 0
        if preempted or looks >= CROWDED_LOOKS:
            # Until there are as few as asked for, the engine cannot say whether these are few enough.
            limit = self.limit if ours > self.limit else max(least, int(DECREASE * ours))
            return Concurrency(limit, 0, signals)
        roomy = not crowded and signals.waiting == 0 and signals.kv_use < _ROOMY
        more = STEP if roomy and queueing and ours >= self.limit else 0
        return Concurrency(min(most, self.limit + more), looks, signals)

    def _stood_still(self, signals: Signals) -> bool:
        """Whether it did nothing since the last look, paused for new weights for instance: who waits tells nothing."""
        if self.seen is None or signals.tokens is None or self.seen.tokens is None:
            return False
        return signals.tokens == self.seen.tokens and signals.running + signals.waiting > 0
