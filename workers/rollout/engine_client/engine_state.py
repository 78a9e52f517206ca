"""What this client knows about one engine: health, load, policy version, and the requests in flight."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import anyio

from stream.errors import EngineError
from workers.engine_api.engine_queries import EngineAvailability
from workers.rollout.engine_client.load import AdaptiveLimit, EngineMetrics
from workers.rollout.engine_client.probe import Capabilities
from workers.rollout.engine_client.sampling import UNVERSIONED

_VERSION_FRESH_S: Final = 1.0
"""How long the last reported version counts as current: the engine may have restarted since."""
_VERSION_KEPT_S: Final = 0.1
"""The same where answers name no version: a turn that begins so soon after an update may get the version before it."""


class Candidate(NamedTuple):
    """An engine that a request may go to."""

    url: str
    load: int
    """Requests of this client that it works on."""
    limit: int
    """Upper bound of `load`."""


class VersionQuery:
    """A query of an engine's policy version that several requests wait for.

    Attributes:
        answered: set when `version`, or `error`, is there.
        version: the answer.
        error: why there is none.
    """

    def __init__(self) -> None:
        self.answered = anyio.Event()
        self.version = UNVERSIONED
        self.error: EngineError | None = None


class EngineState:
    """One engine's state. Every change is a method; `Router`, `HealthMonitor` and `EngineSampler` call them.

    Args:
        url: base URL.
        min_requests: lower bound of the adaptive limit.
        max_requests: upper bound of the adaptive limit, and its first value.

    Attributes:
        load: requests of this client that are in flight at the engine.
        capabilities: what the last probe found; None while the engine is not healthy: not probed yet, ejected, or
            removed.
        availability: whether the engine answers, and why it does not; logs both changes once.
        failures: consecutive failed requests.
        ejections: consecutive ejections without a successful request between them.
        version: policy version that the engine last reported.
        waits_for_weights: a request needed a newer version than the engine has. Until it has newer weights, the
            engine gets only requests that its version can serve.
        refuses: it refused a request for now and said for how long; it gets none until then.
        next_version_query: the query that is about to be sent, if there is one.
        first_probe_done: set after the first probe, whatever it found.
        busy: set while `load` is above 0.
    """

    def __init__(self, url: str, min_requests: int, max_requests: int) -> None:
        self.url = url
        self.load = 0
        self.capabilities: Capabilities | None = None
        self.availability = EngineAvailability(url)
        self.failures = 0
        self.ejections = 0
        self.version = UNVERSIONED
        self.waits_for_weights = self.refuses = False
        self.next_version_query: VersionQuery | None = None
        self.first_probe_done = anyio.Event()
        self.busy = anyio.Event()
        self._monitor_scope = anyio.CancelScope()
        self._min_requests, self._max_requests = min_requests, max_requests
        self._limit = AdaptiveLimit(max_requests)
        self._version_seen_at = self._succeeded_at = -math.inf
        self._version_seen_over: int | None = None
        self._polling_scope = anyio.CancelScope()
        self._check_in_progress = False

    # Load

    @property
    def candidate(self) -> Candidate:
        """The engine's load and limit, for `choose_engine`."""
        return Candidate(self.url, self.load, self._limit.limit)

    @property
    def is_full(self) -> bool:
        """Whether this client may send the engine no further request now."""
        return self.load >= self._limit.limit

    @property
    def limit(self) -> int:
        """Upper bound of `load`."""
        return self._limit.limit

    def start_request(self) -> None:
        """Count one more request."""
        self.load += 1
        if self.load == 1:
            self.busy.set()

    def finish_request(self) -> None:
        """Count one request less."""
        self.load -= 1
        if not self.load:
            self.busy = anyio.Event()

    def start_refusing(self) -> bool:
        """Send the engine no further requests; false if none are sent already."""
        started, self.refuses = not self.refuses, True
        return started

    def finish_refusing(self) -> None:
        """Send requests again."""
        self.refuses = False

    def update_limit(self, metrics: EngineMetrics, *, has_waiting: bool, is_only: bool) -> None:
        """Adapt the limit to the engine's metrics.

        Args:
            metrics: what the engine reports.
            has_waiting: whether a request that this engine could serve waits in this client.
            is_only: whether the client has no other engine for it.
        """
        self._limit = self._limit.updated(
            metrics,
            in_flight=self.load,
            has_waiting=has_waiting,
            is_only=is_only,
            minimum=self._min_requests,
            maximum=self._max_requests,
        )

    # Health

    @property
    def is_healthy(self) -> bool:
        """Whether the last probe succeeded and the engine was not ejected or removed since."""
        return self.capabilities is not None

    @contextmanager
    def monitoring(self) -> Iterator[None]:
        """Run the engine's monitoring task; removing the engine ends the body without an exception."""
        with self._monitor_scope:
            yield

    @contextmanager
    def polling(self) -> Iterator[None]:
        """Run the polling of a healthy engine; ejecting the engine ends the body without an exception."""
        with anyio.CancelScope() as self._polling_scope:
            yield

    def mark_healthy(self, capabilities: Capabilities) -> None:
        """Record a successful probe. The engine's version is unknown until it reports one."""
        self.capabilities, self.failures = capabilities, 0
        self.version, self._version_seen_at, self.waits_for_weights = UNVERSIONED, -math.inf, False
        self.availability.mark_available()
        self.first_probe_done.set()

    def mark_unavailable(self, error: EngineError) -> None:
        """Record a failed probe."""
        self.availability.mark_unavailable(error)
        self.first_probe_done.set()

    def record_success(self) -> None:
        """Record a valid sample."""
        self.failures = self.ejections = 0
        self._succeeded_at = time.monotonic()

    def record_failure(self) -> None:
        """Record a failed request."""
        self.failures += 1

    def succeeded_since(self, time: float) -> bool:
        """Whether the engine gave a valid sample after this moment, in `time.monotonic()` seconds."""
        return self._succeeded_at > time

    def start_check(self) -> bool:
        """Begin a health check; false if one is in progress."""
        started, self._check_in_progress = not self._check_in_progress, True
        return started

    def finish_check(self) -> None:
        """End the health check."""
        self._check_in_progress = False

    def eject(self, error: EngineError) -> None:
        """Send the engine no requests until a new probe succeeds, since another server may run there by then."""
        if self.capabilities is None:
            return
        self.capabilities = None
        self.ejections += 1
        self.availability.mark_ejected(error)
        self._polling_scope.cancel()

    def remove(self) -> None:
        """Stop using and monitoring the engine. Requests in flight may finish."""
        self.capabilities = None
        self._monitor_scope.cancel()

    # Policy version

    def record_version(self, version: int, connection_epoch: int | None = None) -> None:
        """Record a reported version; an engine that lost its version has restarted, perhaps as another server.

        Args:
            version: what it reports.
            connection_epoch: of the connections to it, now (`ConnectionPool.connection_epoch`).
        """
        before = self.version
        self.version, self._version_seen_at, self._version_seen_over = version, time.monotonic(), connection_epoch
        if version == UNVERSIONED < before:
            self.eject(EngineError(f"{self.url} has no policy version after {before}, so it has restarted"))

    def forget_version(self) -> None:
        """Record that the engine unloaded the version that it last reported, without a restart."""
        self.version, self._version_seen_at = UNVERSIONED, time.monotonic()

    def start_waiting_for_weights(self, error: EngineError) -> bool:
        """Stop requests for newer versions; false if they are stopped already."""
        self.availability.log_waiting("weights", error)
        started, self.waits_for_weights = not self.waits_for_weights, True
        return started

    def finish_waiting_for_weights(self) -> None:
        """Allow requests for newer versions again."""
        self.waits_for_weights = False

    def has_version(self, version: int) -> bool:
        """Whether the engine recently reported this version or a newer one."""
        is_fresh = time.monotonic() - self._version_seen_at < _VERSION_FRESH_S
        return (self.version if is_fresh else UNVERSIONED) >= version

    def has_had_version(self, version: int, connection_epoch: int | None) -> bool:
        """Whether the engine reported this version or a newer one just now, over connections that are still there.

        So no other server has taken over its address since.
        """
        is_same = connection_epoch is not None and connection_epoch == self._version_seen_over
        is_recent = time.monotonic() - self._version_seen_at < _VERSION_KEPT_S
        return is_same and is_recent and self.version >= version

    def can_serve(self, min_policy_version: int) -> bool:
        """Whether the engine may get a request that needs this version or a newer one."""
        return (
            self.is_healthy and not self.refuses and (not self.waits_for_weights or self.version >= min_policy_version)
        )

    def outdated_error(self, min_policy_version: int) -> EngineError:
        """Return the error for an engine whose weights are older than this version."""
        has = "no policy version yet" if self.version == UNVERSIONED else f"policy version {self.version}"
        return EngineError(f"{self.url} has {has}, older than {min_policy_version}")
