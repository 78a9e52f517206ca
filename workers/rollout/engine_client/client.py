"""Client of the run's engines: prompt ids in, sampled ids with log-probs and policy versions out. Loads no torch.

What may go wrong with a request, and what follows::

    no answer                                another engine immediately; if there is none, wait for one,
                                             at most `unavailable_timeout_s`                    EngineUnavailableError
    429 or 503 with `Retry-After`            another engine immediately; if there is none, the same one after that time,
                                             at most `unavailable_timeout_s`                    EngineUnavailableError
    500s, 429, 408, a timeout, an invalid    another engine immediately; if there is none, the same one with back-off;
    answer, an abort                         `max_attempts` attempts in all                     EngineError
    weights older than `min_policy_version`  another engine immediately; if there is none, wait for newer weights,
                                             at most `unavailable_timeout_s`                    EngineUnavailableError
    any other 4xx                            no retry: the request itself is wrong              EngineRefusedError
"""

import math
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

import anyio
import structlog

from stream.errors import EngineError, EngineRefusedError, EngineUnavailableError
from stream.queue.in_flight import Activity
from stream.waiting import Backoff
from workers.engine_api.connection_pool import ConnectionPool, EngineBusyError, RequestTimeoutError, UnreachableError
from workers.engine_api.discovery import EngineDiscovery
from workers.rollout.engine_client.engine_sampler import EngineSampler, StaleWeightsError
from workers.rollout.engine_client.engine_state import EngineState
from workers.rollout.engine_client.health import HealthMonitor
from workers.rollout.engine_client.probe import EngineProbe
from workers.rollout.engine_client.router import Router, RouteRequest
from workers.rollout.engine_client.sampling import UNVERSIONED, IncompatibleEngineError, SampledTurn, SamplingOptions
from workers.settings import Settings

log = structlog.get_logger()

MAX_ATTEMPTS: Final = 3
"""Attempts at one request while some engine answers. An error that passes is gone by the second or third; one that the
request causes must not hold its group for long."""
_BACKOFF: Final = Backoff(0.2, 5.0, jitter=1.0)
"""Between two attempts at the only engine."""


class EngineClient:
    """Samples from the engines of a run, which all serve the same policy. Make and enter it within an event loop.

    Args:
        engines: an `EngineDiscovery`, which the client follows, or fixed URLs.
        request_timeout_s: for one answer.
        max_attempts: attempts at one request while some engine answers.
        unavailable_timeout_s: how long to wait for an engine to answer, or for it to get its weights.
        sampling_options: every way in which the run samples, for the probe.
        uses_adapters: each policy version is an adapter; engines that do not merge it are asked for it by name.
        salts_prefix_cache: engines keep KV blocks that older weights computed; a salt per version keeps them apart.
    """

    def __init__(
        self,
        engines: EngineDiscovery | Sequence[str],
        *,
        request_timeout_s: float,
        max_attempts: int,
        unavailable_timeout_s: float,
        sampling_options: Sequence[SamplingOptions] = (),
        uses_adapters: bool = False,
        salts_prefix_cache: bool = False,
    ) -> None:
        self.sampling_options = tuple(sampling_options)
        self._max_attempts = max_attempts
        self._unavailable_timeout_s = unavailable_timeout_s
        self._discovery = engines if isinstance(engines, EngineDiscovery) else EngineDiscovery(engines)
        self._connections = ConnectionPool()
        self._tasks = anyio.create_task_group()
        self._router = Router(self._discovery)
        self._monitor = HealthMonitor(
            self._discovery,
            self._router,
            self._connections,
            EngineProbe(self._connections, sampling_options=sampling_options, timeout_s=request_timeout_s),
            self._tasks,
            health_timeout_s=unavailable_timeout_s,
        )
        self._sampler = EngineSampler(
            self._connections,
            self._monitor,
            timeout_s=request_timeout_s,
            uses_adapters=uses_adapters,
            salts_prefix_cache=salts_prefix_cache,
        )

    @classmethod
    def from_settings(cls, settings: Settings, engines: EngineDiscovery | Sequence[str]) -> "EngineClient":
        """Make a client with a run's deadlines and ways to sample."""
        sampled = [settings.rollout, *([settings.for_evaluation.rollout] if settings.eval.source else [])]
        return cls(
            engines,
            request_timeout_s=settings.engine.request_timeout_s,
            max_attempts=MAX_ATTEMPTS,
            unavailable_timeout_s=settings.engine_wait_s,
            sampling_options=[
                SamplingOptions.from_settings(limits, max_tokens=limits.max_tokens) for limits in sampled
            ],
            uses_adapters=settings.publishes_adapters,
            salts_prefix_cache=settings.weights.kv_cache == "keep",
        )

    async def __aenter__(self) -> Self:
        await self._connections.__aenter__()
        await self._tasks.__aenter__()
        self._monitor.set_engines(self._discovery.urls)
        self._tasks.start_soon(self._monitor.follow_discovery)
        self._tasks.start_soon(self._discovery.watch)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tasks.cancel_scope.cancel()
        try:
            if isinstance(error, Exception):  # raise it as itself, not in an exception group
                await self._tasks.__aexit__(None, None, None)
            else:
                await self._tasks.__aexit__(kind, error, trace)
        finally:
            await self._connections.__aexit__(kind, error, trace)

    @property
    def known_count(self) -> int:
        """Engines that the client knows, healthy or not."""
        return len(self._router.engines)

    @property
    def healthy_count(self) -> int:
        """Engines that answer and are compatible with the run."""
        return len(self._router.healthy)

    @property
    def context_length(self) -> int:
        """Tokens that every healthy engine takes, answer included; 0 if none reports it."""
        known = [engine.capabilities.max_length for engine in self._router.healthy if engine.capabilities]
        return min(filter(None, known), default=0)

    async def wait_until_ready(self) -> None:
        """Wait until an engine answers; check that every engine that answers is compatible with the run.

        Raises:
            EngineUnavailableError: none answered within `unavailable_timeout_s`.
            IncompatibleEngineError: an engine does not serve vLLM's API, or lacks what the run needs.
        """
        for engine in list(self._router.engines.values()):
            with anyio.move_on_after(self._unavailable_timeout_s):
                await engine.first_probe_done.wait()
            problem = engine.availability.problem
            if isinstance(problem, IncompatibleEngineError):
                raise problem
        self._router.release(await self._router.acquire(RouteRequest(UNVERSIONED), self._unavailable_timeout_s))

    async def sample(
        self, prompt_ids: Sequence[int], options: SamplingOptions, *, min_policy_version: int = 0
    ) -> SampledTurn:
        """Sample one turn. Cancelling the caller aborts the request at the engine. See `Sampler.sample`."""
        started, attempts = time.monotonic(), 0
        stale_since = busy_since = math.inf
        failed: EngineState | None = None
        while True:
            route = RouteRequest(min_policy_version, options.group, options.completion, failed)
            options.progress.activity = Activity.ENGINE_WAIT
            engine = failed = await self._router.acquire(route, self._unavailable_timeout_s)
            options.progress.engine, options.progress.activity = engine.url, Activity.SAMPLING
            try:
                sampled = await self._sampler.sample(engine, prompt_ids, options, min_policy_version)
            except EngineRefusedError:
                raise
            except StaleWeightsError as error:
                stale_since = min(stale_since, time.monotonic())
                waited_s = time.monotonic() - stale_since
                has_alternative = self._router.has_alternative(engine, min_policy_version)
                if waited_s > self._unavailable_timeout_s and not has_alternative:
                    raise EngineUnavailableError(f"{error}, for {waited_s:.3g} s; is the trainer running?") from error
                self._monitor.wait_for_weights(engine, error)
                continue
            except EngineBusyError as error:
                busy_since = min(busy_since, time.monotonic())
                waited_s = time.monotonic() - busy_since
                if waited_s > self._unavailable_timeout_s:
                    raise EngineUnavailableError(f"{error}, for {waited_s:.3g} s") from error
                self._monitor.wait_while_busy(engine, error)
                continue
            except EngineError as error:
                attempts += 1
                await self._record_failure(engine, min_policy_version, error, attempts)
                if attempts >= self._max_attempts:
                    raise await self._final_error(error, started, attempts) from error
            else:
                self._router.record_affinity(route, engine)
                return sampled
            finally:
                self._router.release(engine)
            if not self._router.has_alternative(engine, min_policy_version):
                await anyio.sleep(_BACKOFF.delay_s(attempts))

    async def _record_failure(
        self, engine: EngineState, min_policy_version: int, error: EngineError, attempts: int
    ) -> None:
        """Update the engine's health after a failed request."""
        if isinstance(error, UnreachableError):
            engine.eject(error)
            return
        log.warning("engine.request_failed", url=engine.url, attempts=attempts, why=str(error))
        if isinstance(error, RequestTimeoutError) and await self._is_paused(engine):
            return  # it is installing new weights, which takes long
        self._monitor.record_failure(engine, min_policy_version, error)

    async def _is_paused(self, engine: EngineState) -> bool:
        """Whether the engine reports that it is paused."""
        try:
            answer = await self._connections.get(f"{engine.url}/is_paused", dict[str, object])
        except EngineError:
            return False
        return bool(answer.get("is_paused"))

    async def _final_error(self, error: EngineError, started: float, attempts: int) -> EngineError:
        """Make the error after the last attempt: about this request if engines answer, otherwise about the engines."""
        succeeded = any(engine.succeeded_since(started) for engine in self._router.engines.values())
        healthy = succeeded or any([await self._monitor.check_health(engine) for engine in self._router.healthy])
        kind = EngineError if healthy else EngineUnavailableError
        return kind(f"{attempts} attempts failed; the last: {error}")
