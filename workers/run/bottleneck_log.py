"""Logs what limits a run, when that changes for longer than a moment."""

from collections import Counter, deque
from typing import Final

import structlog

from stream.operator.bottleneck import Bottleneck

log = structlog.get_logger()

_WINDOW: Final = 30
"""Observations. Where rollouts and steps take turns the limit changes all the time, but not that of the majority."""


class BottleneckLog:
    """Logs `bottleneck.changed` when another part of the pipeline limits most of the last observations."""

    def __init__(self) -> None:
        self._recent: deque[tuple[str, str]] = deque(maxlen=_WINDOW)
        self._logged: tuple[str, str] | None = None

    def observe(self, found: Bottleneck) -> None:
        """Count an observation; call it about once a second."""
        self._recent.append((found.limit, found.name))
        now, count = Counter(self._recent).most_common(1)[0]
        if count > _WINDOW // 2 and now != self._logged and now == self._recent[-1]:
            self._logged = now
            log.info("bottleneck.changed", limit=found.limit, name=found.name or None, why=found.why)
