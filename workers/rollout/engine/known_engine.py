"""One engine, as a client knows it: its load, its policy version, and what of it is awaited."""

import math
from typing import Literal

import anyio
import structlog

from stream.errors import EngineError
from workers.rollout.engine.answer import NONE_YET
from workers.rollout.engine.probe import Facts

log = structlog.get_logger()

_TRUSTED_S = 1.0
"""How long an engine is taken to have the version that it last spoke of: it may have been started anew since."""


class KnownEngine:
    """One server, as this client knows it."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.load = 0
        """Requests of ours that it works on."""
        self.version = NONE_YET
        """Policy version that it last spoke of."""
        self.spoke_at = -math.inf
        """When it did."""
        self.asked_at = -math.inf
        """When it was last asked for that."""
        self.facts: Facts | None = None
        """What it is and can do; None where nobody knows: not met yet, or silent since."""
        self.looking = anyio.Lock()
        """Held by whoever finds that out; the others wait."""
        self._awaited: set[str] = set()

    def awaited(self, what: Literal["answer", "weights"], why: EngineError) -> None:
        """Say that we wait for it: once, however many requests do, and however long."""
        if what == "answer":
            self.facts = None  # another server may answer there next
        if what not in self._awaited:
            self._awaited.add(what)
            log.warning("engine.awaited", url=self.url, what=what, why=str(why))

    def came(self, what: Literal["answer", "weights"]) -> None:
        """Say that it came, where that was waited for."""
        if what in self._awaited:
            self._awaited.discard(what)
            log.info("engine.returned", url=self.url, what=what)

    def spoke(self, version: int) -> None:
        """It has this version now."""
        self.version, self.spoke_at = version, anyio.current_time()

    def has(self, version: int) -> bool:
        """Whether it can be taken to have this version, or a newer one."""
        known = self.version if anyio.current_time() - self.spoke_at < _TRUSTED_S else NONE_YET
        return known >= version
