"""One engine, as a client knows it: whether it is there, its load, its policy version, and what of it is awaited."""

import math
from typing import Literal

import anyio
import structlog

from stream.errors import EngineError
from workers.rollout.engine_client.adaptive_limit import AdaptiveLimit
from workers.rollout.engine_client.affinity import Candidate
from workers.rollout.engine_client.probe import Capabilities
from workers.rollout.engine_client.sampled_turn import UNVERSIONED

log = structlog.get_logger()

_VERSION_FRESH_S = 1.0
"""How long an engine is taken to have the version that it last spoke of: it may have been started anew since."""


class EngineState:
    """One server, as this client knows it.

    Args:
        url: its base URL.
        max_requests: requests of ours that it may work on.
    """

    def __init__(self, url: str, max_requests: int) -> None:
        self.url = url
        self.load = 0
        """Requests of ours that it works on."""
        self.limit = AdaptiveLimit(max_requests)
        """How many those may be."""
        self.capabilities: Capabilities | None = None
        """What it is and can do; None where it is not there: not met yet, or ejected."""
        self.problem: EngineError | None = None
        """Why it is not there; None before anybody looked."""
        self.failures = 0
        """Requests that failed in a row, though it seems to live."""
        self.check_in_progress = False
        """Somebody asks right now whether it does."""
        self.ejections = 0
        """In a row, without an answer between them."""
        self.version = UNVERSIONED
        """Policy version that it last spoke of."""
        self.version_seen_at = self.answered_at = -math.inf
        """When it did, and when it last answered a request for tokens."""
        self.waits_for_weights = False
        """Its version was too old for a request; what is asked of it now is whether that has changed."""
        self.first_probe_done = anyio.Event()
        """Set once somebody has looked whether it is there."""
        self.busy = anyio.Event()
        """Set while it works on a request of ours."""
        self.monitor_scope = anyio.CancelScope()
        """Round all that looks after it."""
        self.polling_scope = anyio.CancelScope()
        """Round what does so while it is there."""
        self.request_scopes: set[anyio.CancelScope] = set()
        """Round each request that it works on."""
        self._waiting_for: set[str] = set()

    @property
    def candidate(self) -> Candidate:
        """As the choice sees it."""
        return Candidate(self.url, self.load, self.limit.limit)

    def start_request(self) -> None:
        """It has one request more."""
        self.load += 1
        self.busy.set()

    def finish_request(self) -> None:
        """It has one request less."""
        self.load -= 1
        if not self.load:
            self.busy = anyio.Event()

    def record_success(self) -> None:
        """It gave a sample."""
        self.failures = self.ejections = 0
        self.answered_at = anyio.current_time()

    def mark_healthy(self, capabilities: Capabilities) -> None:
        """It is there. Nobody knows its weights yet."""
        self.capabilities, self.problem, self.failures = capabilities, None, 0
        self.version, self.version_seen_at, self.waits_for_weights = UNVERSIONED, -math.inf, False
        self.log_recovered("answer")
        self.first_probe_done.set()

    def mark_unavailable(self, why: EngineError) -> None:
        """Somebody looked, and it is not there. Said once, however often anybody looks."""
        self.problem = why
        self.first_probe_done.set()
        self.log_waiting("answer", why)

    def mark_ejected(self, why: EngineError) -> None:
        """It is asked for nothing until it was looked at: another server may answer there next."""
        self.capabilities, self.problem = None, why
        self.ejections += 1
        self._waiting_for.add("answer")
        log.warning("engine.ejected", url=self.url, why=str(why))

    def log_waiting(self, what: Literal["answer", "weights"], why: EngineError) -> None:
        """Say that we wait for it: once, however many requests do, and however long."""
        if what not in self._waiting_for:
            self._waiting_for.add(what)
            log.warning("engine.waiting", url=self.url, what=what, why=str(why))

    def log_recovered(self, what: Literal["answer", "weights"]) -> None:
        """Say that it came, where that was waited for."""
        if what in self._waiting_for:
            self._waiting_for.discard(what)
            log.info("engine.recovered", url=self.url, what=what)

    def record_version(self, version: int) -> None:
        """It has this version now."""
        self.version, self.version_seen_at = version, anyio.current_time()

    def has_version(self, version: int) -> bool:
        """Whether it can be taken to have this version, or a newer one."""
        known = self.version if anyio.current_time() - self.version_seen_at < _VERSION_FRESH_S else UNVERSIONED
        return known >= version

    def can_serve(self, min_policy_version: int) -> bool:
        """Whether a request for this version or a newer one may go to it, as far as anybody knows."""
        return self.capabilities is not None and (not self.waits_for_weights or self.version >= min_policy_version)
