"""Looks after the engines of a run: who is there, who is ejected, who has come back, and how much each can do.

One task to an engine. Until it is there, the task looks for it, with growing pauses; once it is, what the engine says
of itself at `/metrics` decides how many requests it is given, and that it says anything at all shows that it lives.
Requests never look: they wait for a place (`places.py`).

An engine is ejected where its connections break, where `FAILURES` requests fail in a row that others may answer, and
where two questions in a row remain without an answer; and where it lost a route, or its version: another server
answers there, perhaps of another kind. It comes back when it was looked at like one that is new.
"""

import random
from collections.abc import Sequence
from http import HTTPStatus
from typing import Final

import anyio
import structlog
from anyio.abc import TaskGroup

from stream.errors import EngineError
from workers.engine_api.connection import QUERY_TIMEOUT_S, ConnectionPool, UnreachableError
from workers.engine_api.discovery.discovery import EngineDiscovery
from workers.engine_api.wire import WeightInfo
from workers.rollout.engine_client.engine_metrics import parse_metrics
from workers.rollout.engine_client.engine_state import EngineState
from workers.rollout.engine_client.probe import EngineProbe
from workers.rollout.engine_client.router import Router
from workers.rollout.engine_client.sampled_turn import UNVERSIONED, IncompatibleEngineError, version_from_name

log = structlog.get_logger()

MAX_FAILURES: Final = 3
"""In a row, for which an engine that seems to live is ejected."""
_MAX_UNANSWERED: Final = 2
"""Questions in a row without an answer, for which it is ejected, and its requests are asked elsewhere."""
_MIN_PROBE_PAUSE_S, _MAX_PROBE_PAUSE_S = 0.05, 2.0
_MAX_EJECTION_S: Final = 30.0
"""An engine that seems to live, and yet fails again and again, is left alone for so long."""
_INCOMPATIBLE_PAUSE_S: Final = 10.0
_POLL_INTERVAL_S: Final = (1.0, 2.0)
"""Between two looks at an engine's figures; at random, so that workers do not come together."""
_VERSION_INTERVAL_S: Final = 0.5
"""Between two questions for an engine's version, however many requests wait for it."""


class HealthMonitor:
    """Looks after engines.

    Args:
        discovery: which engines there are.
        router: where requests wait for them.
        connection: the way to them.
        probe: what makes one fit.
        tasks: where its tasks run.
        bounds: least and most requests of ours at one engine.
        health_timeout_s: for an answer to the question whether one lives.
    """

    def __init__(
        self,
        discovery: EngineDiscovery,
        router: Router,
        connection: ConnectionPool,
        probe: EngineProbe,
        tasks: TaskGroup,
        bounds: tuple[int, int],
        health_timeout_s: float,
    ) -> None:
        self._discovery, self._router, self._connection, self._probe = discovery, router, connection, probe
        self._tasks = tasks
        self._min_requests, self._max_requests = bounds
        self._health_timeout_s = min(QUERY_TIMEOUT_S, health_timeout_s)

    async def follow_discovery(self) -> None:
        """Begin with engines that are added, let go of those that are removed; for ever."""
        while True:
            changed = self._discovery.changed
            self.set_engines(self._discovery.urls)
            await changed.wait()

    def set_engines(self, urls: Sequence[str]) -> None:
        """Know these engines and no others. What one that is removed works on, it may finish."""
        known = self._router.engines
        for url in [url for url in known if url not in urls]:
            removed = known.pop(url)
            removed.capabilities = None
            removed.monitor_scope.cancel()
        for url in urls:
            if url not in known:
                known[url] = EngineState(url, self._max_requests)
                self._tasks.start_soon(self._monitor_engine, known[url])

    def eject(self, engine: EngineState, why: EngineError) -> None:
        """Let nobody ask it until it was looked at."""
        if engine.capabilities is not None:
            engine.mark_ejected(why)
            engine.polling_scope.cancel()

    def record_failure(self, engine: EngineState, min_policy_version: int, error: EngineError) -> None:
        """Take note that it answered with an error, or not in time."""
        engine.failures += 1
        if engine.failures >= MAX_FAILURES and self._router.has_alternative(engine, min_policy_version):
            self.eject(engine, EngineError(f"{engine.failures} requests failed in a row; the last: {error}"))
        elif not engine.check_in_progress:
            engine.check_in_progress = True
            self._tasks.start_soon(self.check_health, engine)

    async def check_health(self, engine: EngineState) -> bool:
        """Whether it says that it is well; if not, it is ejected."""
        try:
            await self._get_health(engine)
        except EngineError as error:
            self.eject(engine, error)
            return False
        finally:
            engine.check_in_progress = False
        return True

    def wait_for_weights(self, engine: EngineState, why: EngineError) -> None:
        """Let nobody ask it who needs weights newer than it has, until it has others."""
        engine.log_waiting("weights", why)
        if not engine.waits_for_weights:
            engine.waits_for_weights = True
            self._tasks.start_soon(self._poll_version, engine)

    async def fetch_version(self, engine: EngineState) -> int:
        """Ask it which policy version it has."""
        info = await self._connection.get(f"{engine.url}/weight_info", WeightInfo)
        self.record_version(engine, version_from_name(info.weight_version))
        return engine.version

    def record_version(self, engine: EngineState, version: int) -> None:
        """It told its version. One that has none any more was started anew, and perhaps otherwise.

        An older one tells nothing: of two answers round an update, the first may be read last.
        """
        before = engine.version
        engine.record_version(version)
        if version == UNVERSIONED < before:
            why = f"{engine.url} has no policy version after {before}, so it was started anew"
            self.eject(engine, EngineError(why))

    async def _poll_version(self, engine: EngineState) -> None:
        before, unanswered = engine.version, 0
        while engine.waits_for_weights and engine.capabilities is not None:
            await anyio.sleep(_VERSION_INTERVAL_S)
            try:
                if await self.fetch_version(engine) != before:
                    engine.waits_for_weights = False
                unanswered = 0
            except EngineError as error:
                unanswered += 1
                if isinstance(error, UnreachableError) or unanswered >= _MAX_UNANSWERED:
                    self.eject(engine, error)
        self._router.dispatch()

    async def _monitor_engine(self, engine: EngineState) -> None:
        with engine.monitor_scope:
            while True:
                await self._wait_until_healthy(engine)
                self._router.dispatch()
                with anyio.CancelScope() as engine.polling_scope:
                    await self._poll_metrics(engine)
                fails_though_alive = engine.failures >= MAX_FAILURES
                if fails_though_alive:
                    await anyio.sleep(min(_MAX_EJECTION_S, 2.0 ** min(engine.ejections, 10) / 4))

    async def _wait_until_healthy(self, engine: EngineState) -> None:
        """Look until it is there, and is what it should be."""
        pause = _MIN_PROBE_PAUSE_S
        while True:
            try:
                await self._get_health(engine)
                engine.mark_healthy(await self._probe.inspect(engine.url))
            except EngineError as error:
                engine.mark_unavailable(error)
                await anyio.sleep(random.uniform(pause / 2, pause))
                pause = (
                    _INCOMPATIBLE_PAUSE_S
                    if isinstance(error, IncompatibleEngineError)
                    else min(2 * pause, _MAX_PROBE_PAUSE_S)
                )
            else:
                return

    async def _poll_metrics(self, engine: EngineState) -> None:
        """While it works, look how busy it is."""
        path, unanswered = "/metrics", 0
        while True:
            await engine.busy.wait()
            await anyio.sleep(random.uniform(*_POLL_INTERVAL_S))
            asked_at = anyio.current_time()
            try:
                status, payload = await self._connection.request("GET", engine.url + path, QUERY_TIMEOUT_S)
            except UnreachableError as error:
                return self.eject(engine, error)
            except EngineError as error:
                unanswered = unanswered + 1 if engine.answered_at < asked_at else 0
                if unanswered >= _MAX_UNANSWERED:
                    return self._eject_and_retry_elsewhere(engine, error)
                continue
            unanswered = 0
            metrics = parse_metrics(payload.decode(errors="replace")) if status == 200 else None
            if metrics is not None:
                engine.limit = engine.limit.updated(
                    metrics,
                    in_flight=engine.load,
                    has_waiting=self._router.has_waiting_for(engine),
                    minimum=self._min_requests,
                    maximum=self._max_requests,
                )
                self._router.dispatch()
            elif path == "/metrics" and status < HTTPStatus.INTERNAL_SERVER_ERROR:
                path = "/health"
                log.info("engine.metrics_missing", url=engine.url, limit=engine.limit.limit)

    def _eject_and_retry_elsewhere(self, engine: EngineState, why: EngineError) -> None:
        """It is silent: what it works on is asked elsewhere, where there is an elsewhere."""
        self.eject(engine, why)
        if self._router.healthy:
            for request in engine.request_scopes:
                request.cancel()

    async def _get_health(self, engine: EngineState) -> None:
        status, _ = await self._connection.request("GET", engine.url + "/health", self._health_timeout_s)
        if status != 200:
            raise EngineError(f"{engine.url}/health answers {status}")
