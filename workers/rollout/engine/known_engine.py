"""One engine, as a client knows it: whether it is there, its load, its policy version, and what of it is awaited."""

import math
from typing import Literal

import anyio
import structlog

from stream.errors import EngineError
from workers.rollout.engine.answer import NONE_YET
from workers.rollout.engine.choice import Seat
from workers.rollout.engine.concurrency import Concurrency
from workers.rollout.engine.probe import Facts

log = structlog.get_logger()

_TRUSTED_S = 1.0
"""How long an engine is taken to have the version that it last spoke of: it may have been started anew since."""


class KnownEngine:
    """One server, as this client knows it.

    Args:
        url: its base URL.
        most: requests of ours that it may work on.
    """

    def __init__(self, url: str, most: int) -> None:
        self.url = url
        self.load = 0
        """Requests of ours that it works on."""
        self.concurrency = Concurrency(most)
        """How many those may be."""
        self.facts: Facts | None = None
        """What it is and can do; None where it is not there: not met yet, or ejected."""
        self.problem: EngineError | None = None
        """Why it is not there; None before anybody looked."""
        self.failures = 0
        """Requests that failed in a row, though it seems to live."""
        self.checked = False
        """Somebody asks right now whether it does."""
        self.ejections = 0
        """In a row, without an answer between them."""
        self.version = NONE_YET
        """Policy version that it last spoke of."""
        self.spoke_at = self.answered_at = -math.inf
        """When it did, and when it last answered a request for tokens."""
        self.lacks_weights = False
        """Its version was too old for a request; what is asked of it now is whether that has changed."""
        self.looked = anyio.Event()
        """Set once somebody has looked whether it is there."""
        self.works = anyio.Event()
        """Set while it works on a request of ours."""
        self.watch = anyio.CancelScope()
        """Round all that looks after it."""
        self.attendance = anyio.CancelScope()
        """Round what does so while it is there."""
        self.requests: set[anyio.CancelScope] = set()
        """Round each request that it works on."""
        self._awaited: set[str] = set()

    @property
    def seat(self) -> Seat:
        """As the choice sees it."""
        return Seat(self.url, self.load, self.concurrency.limit)

    def begin(self) -> None:
        """It has one request more."""
        self.load += 1
        self.works.set()

    def end(self) -> None:
        """It has one request less."""
        self.load -= 1
        if not self.load:
            self.works = anyio.Event()

    def answered(self) -> None:
        """It gave a sample."""
        self.failures = self.ejections = 0
        self.answered_at = anyio.current_time()

    def found(self, facts: Facts) -> None:
        """It is there. Nobody knows its weights yet."""
        self.facts, self.problem, self.failures = facts, None, 0
        self.version, self.spoke_at, self.lacks_weights = NONE_YET, -math.inf, False
        self.came("answer")
        self.looked.set()

    def missed(self, why: EngineError) -> None:
        """Somebody looked, and it is not there. Said once, however often anybody looks."""
        self.problem = why
        self.looked.set()
        self.awaited("answer", why)

    def ejected(self, why: EngineError) -> None:
        """It is asked for nothing until it was looked at: another server may answer there next."""
        self.facts, self.problem = None, why
        self.ejections += 1
        self._awaited.add("answer")
        log.warning("engine.ejected", url=self.url, why=str(why))

    def awaited(self, what: Literal["answer", "weights"], why: EngineError) -> None:
        """Say that we wait for it: once, however many requests do, and however long."""
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

    def may_take(self, at_least: int) -> bool:
        """Whether a request for this version or a newer one may go to it, as far as anybody knows."""
        return self.facts is not None and (not self.lacks_weights or self.version >= at_least)
