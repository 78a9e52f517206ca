"""Monitor the engines of a run: probe them, eject failing ones, take recovered ones back, and poll their load.

One task per engine. Until the engine is healthy, the task probes it, with growing pauses. Then it polls `/metrics`,
which adapts the number of requests that the engine gets, and shows that the engine is alive. Requests never probe: they
wait in the `Router`.

An engine is ejected when a connection to it breaks, when `MAX_FAILURES` requests fail in a row that others may answer,
when two polls in a row remain unanswered, and when it lost a route or its policy version, because another server may
answer at its address now. It returns after a new probe.
"""

import itertools
import random
import time
from collections.abc import Sequence
from http import HTTPStatus
from typing import Final

import anyio
import structlog
from anyio.abc import TaskGroup

from stream.errors import EngineError
from stream.waiting import Backoff
from workers.engine_api.connection_pool import QUERY_TIMEOUT_S, ConnectionPool, EngineBusyError, UnreachableError
from workers.engine_api.discovery import EngineDiscovery
from workers.engine_api.engine_queries import check_health, fetch_weight_name
from workers.rollout.engine_client.engine_state import EngineState, VersionQuery
from workers.rollout.engine_client.load import MAX_CONCURRENCY, MIN_CONCURRENCY, parse_metrics
from workers.rollout.engine_client.probe import EngineProbe
from workers.rollout.engine_client.router import Router
from workers.rollout.engine_client.sampling import UNVERSIONED, IncompatibleEngineError, version_from_name

log = structlog.get_logger()

MAX_FAILURES: Final = 3
"""Consecutive failed requests that eject an engine even if its health check succeeds."""
_MAX_UNANSWERED: Final = 2
"""Consecutive unanswered polls that eject an engine; its requests then go elsewhere."""
_PROBE_BACKOFF: Final = Backoff(0.05, 2.0)
"""Between two probes of an engine that is not healthy."""
_INCOMPATIBLE_BACKOFF: Final = Backoff(10.0, 10.0)
"""Between two probes of an engine that stays incompatible."""
_EJECTION_BACKOFF: Final = Backoff(0.5, 30.0, jitter=0.0)
"""Before an engine is probed that passes health checks but keeps failing requests, by its ejections in a row."""
_POLL_INTERVAL_S: Final = (1.0, 2.0)
"""Between two polls of an engine's metrics; random, so that workers do not poll in step."""
_REFUSAL_MARGIN_S: Final = (0.05, 0.3)
"""Added to the time that a busy engine names; random, so that workers do not come back in step."""
_VERSION_GATHERING_S: Final = 0.005
"""How long a query of an engine's version waits for other requests that need one."""
_VERSION_INTERVAL_S: Final = (0.02, 0.5)
"""Least and most between two polls of an engine's version while requests wait for newer weights; in between, a tenth of
the time that they have waited."""


class HealthMonitor:
    """Monitors every engine that discovery finds.

    Args:
        discovery: the engines of the run.
        router: gets each engine, and is notified when one becomes usable.
        connections: HTTP connections.
        probe: inspects engines.
        tasks: runs the monitoring tasks.
        health_timeout_s: for the answer to a health check.
    """

    def __init__(
        self,
        discovery: EngineDiscovery,
        router: Router,
        connections: ConnectionPool,
        probe: EngineProbe,
        tasks: TaskGroup,
        *,
        health_timeout_s: float,
    ) -> None:
        self._discovery, self._router, self._connections, self._probe = discovery, router, connections, probe
        self._tasks = tasks
        self._health_timeout_s = min(QUERY_TIMEOUT_S, health_timeout_s)

    async def follow_discovery(self) -> None:
        """Start monitoring engines that appear, and stop at those that disappear; runs forever."""
        while True:
            changed = self._discovery.changed
            self.set_engines(self._discovery.urls)
            await changed.wait()

    def set_engines(self, urls: Sequence[str]) -> None:
        """Monitor exactly these engines. A removed engine finishes the requests that it works on."""
        engines = self._router.engines
        for url in [url for url in engines if url not in urls]:
            engines.pop(url).remove()
        for url in urls:
            if url not in engines:
                engines[url] = EngineState(url, MIN_CONCURRENCY, MAX_CONCURRENCY)
                self._tasks.start_soon(self._monitor_engine, engines[url])

    def record_failure(self, engine: EngineState, min_policy_version: int, error: EngineError) -> None:
        """Count a request that failed at this engine, and eject the engine or check its health."""
        engine.record_failure()
        if engine.failures >= MAX_FAILURES and self._router.has_alternative(engine, min_policy_version):
            engine.eject(EngineError(f"{engine.failures} requests failed in a row; the last: {error}"))
        elif engine.start_check():
            self._tasks.start_soon(self.check_health, engine)

    async def check_health(self, engine: EngineState) -> bool:
        """Return whether the engine reports that it is healthy; eject it if not."""
        try:
            await check_health(self._connections, engine.url, self._health_timeout_s)
        except EngineError as error:
            engine.eject(error)
            return False
        finally:
            engine.finish_check()
        return True

    def wait_for_weights(self, engine: EngineState, error: EngineError) -> None:
        """Route requests that need newer weights elsewhere until the engine has them."""
        if engine.start_waiting_for_weights(error):
            self._tasks.start_soon(self._poll_version, engine)

    def wait_while_busy(self, engine: EngineState, error: EngineBusyError) -> None:
        """Route requests elsewhere until the engine wants to be asked again."""
        if engine.start_refusing():
            log.info("engine.busy", url=engine.url, retry_after_s=error.retry_after_s, why=str(error))
            self._tasks.start_soon(self._end_refusal, engine, error.retry_after_s)

    async def _end_refusal(self, engine: EngineState, after_s: float) -> None:
        await anyio.sleep(after_s + random.uniform(*_REFUSAL_MARGIN_S))
        engine.finish_refusing()
        self._router.dispatch()

    async def fetch_version(self, engine: EngineState) -> int:
        """Ask the engine for its policy version."""
        version = version_from_name(await fetch_weight_name(self._connections, engine.url))
        engine.record_version(version, self._connections.connection_epoch(engine.url))
        return engine.version

    async def version_after_now(self, engine: EngineState) -> int:
        """Return the engine's policy version from a query sent after this call; calls of about one moment share one.

        Raises:
            EngineError: the engine does not answer, or does not name its weights.
        """
        query = engine.next_version_query
        if query is None:
            query = engine.next_version_query = VersionQuery()
            self._tasks.start_soon(self._ask_version, engine, query)
        await query.answered.wait()
        if query.error is not None:
            raise query.error
        return query.version

    async def _ask_version(self, engine: EngineState, query: VersionQuery) -> None:
        await anyio.sleep(_VERSION_GATHERING_S)
        engine.next_version_query = None  # it is sent now; a later request needs a query that is sent after it
        try:
            query.version = await self.fetch_version(engine)
        except EngineError as error:
            query.error = error
        finally:
            query.answered.set()

    async def _poll_version(self, engine: EngineState) -> None:
        before, unanswered, started = engine.version, 0, anyio.current_time()
        shortest, longest = _VERSION_INTERVAL_S
        while engine.waits_for_weights and engine.is_healthy:
            await anyio.sleep(min(longest, max(shortest, (anyio.current_time() - started) / 10)))
            try:
                if await self.fetch_version(engine) != before:
                    engine.finish_waiting_for_weights()
                unanswered = 0
            except EngineError as error:
                unanswered += 1
                if isinstance(error, UnreachableError) or unanswered >= _MAX_UNANSWERED:
                    engine.eject(error)
        self._router.dispatch()

    async def _monitor_engine(self, engine: EngineState) -> None:
        with engine.monitoring():
            while True:
                await self._wait_until_healthy(engine)
                self._router.dispatch()
                with engine.polling():
                    await self._poll_metrics(engine)
                if engine.failures >= MAX_FAILURES:  # its health checks may well succeed
                    await anyio.sleep(_EJECTION_BACKOFF.delay_s(engine.ejections))

    async def _wait_until_healthy(self, engine: EngineState) -> None:
        """Probe the engine until it is healthy and compatible."""
        for attempt in itertools.count(1):
            try:
                await check_health(self._connections, engine.url, self._health_timeout_s)
                engine.mark_healthy(await self._probe.inspect(engine.url))
            except EngineError as error:
                engine.mark_unavailable(error)
                stays_incompatible = attempt > 1 and isinstance(error, IncompatibleEngineError)
                backoff = _INCOMPATIBLE_BACKOFF if stays_incompatible else _PROBE_BACKOFF
                await anyio.sleep(backoff.delay_s(attempt))
            else:
                return

    async def _poll_metrics(self, engine: EngineState) -> None:
        """While the engine has requests, poll its load; eject it if it stops answering."""
        path, unanswered = "/metrics", 0
        while True:
            await engine.busy.wait()
            await anyio.sleep(random.uniform(*_POLL_INTERVAL_S))
            asked_at = time.monotonic()
            try:
                status, payload = await self._connections.request("GET", engine.url + path, QUERY_TIMEOUT_S)
            except UnreachableError as error:
                return engine.eject(error)
            except EngineError as error:
                unanswered = 0 if engine.succeeded_since(asked_at) else unanswered + 1
                if unanswered >= _MAX_UNANSWERED:
                    return self._eject_and_move_requests(engine, error)
                continue
            unanswered = 0
            metrics = parse_metrics(payload.decode(errors="replace")) if status == 200 else None
            if metrics is not None:
                is_only = not self._router.has_alternative(engine, UNVERSIONED)
                engine.update_limit(metrics, has_waiting=self._router.has_waiting_for(engine), is_only=is_only)
                self._router.dispatch()
            elif path == "/metrics" and status < HTTPStatus.INTERNAL_SERVER_ERROR:
                path = "/health"
                log.info("engine.metrics_missing", url=engine.url, limit=engine.limit)

    def _eject_and_move_requests(self, engine: EngineState, error: EngineError) -> None:
        engine.eject(error)
        if self._router.healthy:
            self._connections.abort_requests(engine.url, f"{engine.url} stopped answering")
