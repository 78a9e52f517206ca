"""The engine's client: prompt ids in, sampled ids with log-probs and policy versions out. No torch.

What may be wrong with an answer, and what is done about it::

    nothing answers                          another engine at once; where there is none, wait until one answers,
                                             `reconnect_s` at most                              EngineUnavailableError
    500s, 429, 408, a time-out, junk,        another engine at once; where there is none, the same with back-off;
    an abort, counts that do not agree       `attempts` times                                   EngineError
    weights older than `at_least`            another engine at once; where there is none, wait until they come,
                                             `reconnect_s` at most                              EngineUnavailableError
    any other 4xx                            a fact about the request: never again              EngineRefusedError
"""

import math
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Self

import anyio
import structlog

from envs.remote.service_client import back_off
from stream.errors import EngineError, EngineRefusedError, EngineUnavailableError
from workers.engine_api.connection import ConnectionPool, RequestTimeoutError, UnreachableError
from workers.engine_api.discovery.discovery import EngineDiscovery
from workers.rollout.engine_client.adaptive_limit import MAX_CONCURRENCY, MIN_CONCURRENCY
from workers.rollout.engine_client.attempt import Attempt, StaleWeightsError
from workers.rollout.engine_client.engine_state import EngineState
from workers.rollout.engine_client.health import HealthMonitor
from workers.rollout.engine_client.probe import EngineProbe
from workers.rollout.engine_client.router import Router, RouteRequest
from workers.rollout.engine_client.sampled_turn import UNVERSIONED, IncompatibleEngineError, SampledTurn
from workers.rollout.engine_client.sampling import SamplingOptions
from workers.settings import Settings

log = structlog.get_logger()


class EngineClient:
    """A connection to the engines of a run, all of the same policy; an async context manager.

    Args:
        engines: which there are: a roster, which is followed, or URLs.
        request_timeout_s: for one answer.
        max_attempts: tries of one request, while something answers.
        unavailable_timeout_s: how long to wait for an engine to answer, or to be given its weights.
        sampling_options: how the run samples, with which an engine is tried when it is met.
        uses_adapters: engines are given adapters, one to a policy version, and asked for one by its name.
        concurrency_bounds: requests under way at one engine, at least and at most; how many, its own figures decide.
        salts_prefix_cache: engines keep what older weights have computed, so each version's requests share cached
            prefixes apart.
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
        concurrency_bounds: tuple[int, int] = (MIN_CONCURRENCY, MAX_CONCURRENCY),
        salts_prefix_cache: bool = False,
    ) -> None:
        self.sampling_options = tuple(sampling_options)
        self._discovery = engines if isinstance(engines, EngineDiscovery) else EngineDiscovery(engines)
        self._connection = ConnectionPool()
        self._probe = EngineProbe(self._connection, sampling_options=sampling_options, timeout_s=request_timeout_s)
        self._router = Router(self._discovery)
        self._concurrency_bounds = concurrency_bounds
        self._attempt_of = partial(
            Attempt, timeout_s=request_timeout_s, uses_adapters=uses_adapters, salts_prefix_cache=salts_prefix_cache
        )
        self._max_attempts = max_attempts
        self._unavailable_timeout_s = unavailable_timeout_s

    @classmethod
    def from_settings(cls, settings: Settings, engines: EngineDiscovery | Sequence[str]) -> "EngineClient":
        """A client with a run's deadlines, bounds, and ways to sample."""
        played = [settings.rollout, *([settings.for_evaluation.rollout] if settings.eval.path else [])]
        return cls(
            engines,
            request_timeout_s=settings.engine.request_timeout_s,
            max_attempts=settings.engine.max_attempts,
            unavailable_timeout_s=settings.engine_wait_s,
            sampling_options=[SamplingOptions.from_settings(limits, max_tokens=limits.max_tokens) for limits in played],
            uses_adapters=settings.publishes_adapters,
            salts_prefix_cache=settings.weights.kv_cache == "keep",
        )

    async def __aenter__(self) -> Self:
        await self._connection.__aenter__()
        self._tasks = await anyio.create_task_group().__aenter__()
        self._monitor = HealthMonitor(
            *(self._discovery, self._router, self._connection, self._probe, self._tasks, self._concurrency_bounds),
            health_timeout_s=self._unavailable_timeout_s,
        )
        self._attempt = self._attempt_of(self._connection, self._monitor)
        self._monitor.set_engines(self._discovery.urls)
        self._tasks.start_soon(self._monitor.follow_discovery)
        self._tasks.start_soon(self._discovery.watch)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tasks.cancel_scope.cancel()
        try:
            if isinstance(error, Exception):  # it leaves as itself, not as a group of itself
                await self._tasks.__aexit__(None, None, None)
            else:
                await self._tasks.__aexit__(kind, error, trace)
        finally:
            await self._connection.__aexit__(kind, error, trace)

    async def wait_until_ready(self) -> None:
        """Wait until an engine answers, and see that each that does is fit for the run.

        Raises:
            EngineUnavailableError: nothing answered for `reconnect_s`.
            EngineError: what answers does not speak vLLM's API, or lacks what the run needs of it.
        """
        for engine in list(self._router.engines.values()):
            with anyio.move_on_after(self._unavailable_timeout_s):
                await engine.first_probe_done.wait()
            if isinstance(engine.problem, IncompatibleEngineError):
                raise engine.problem
        self._router.release(await self._router.acquire(RouteRequest(UNVERSIONED), self._unavailable_timeout_s))

    async def sample(
        self, prompt_ids: Sequence[int], sampling: SamplingOptions, *, min_policy_version: int = 0
    ) -> SampledTurn:
        """Sample one turn. Cancelling the caller aborts it at the engine.

        Args:
            prompt_ids: the whole context.
            sampling: how to sample.
            min_policy_version: the oldest policy version that may sample any of it; -1 for any engine, numbered or not.

        Raises:
            EngineRefusedError: a fact about this request; the message is the engine's.
            EngineError: this request fails while others succeed.
            EngineUnavailableError: nothing answers, or nobody has weights as new as `at_least`.
        """
        began, tries = anyio.current_time(), 0
        stale_since = math.inf
        failed: EngineState | None = None
        while True:
            wanted = RouteRequest(min_policy_version, sampling.group, sampling.completion, failed)
            engine = failed = await self._router.acquire(wanted, self._unavailable_timeout_s)
            try:
                sampled = await self._attempt.sample(engine, prompt_ids, sampling, min_policy_version)
            except EngineRefusedError:
                raise
            except StaleWeightsError as error:
                stale_since = min(stale_since, anyio.current_time())
                waited_s = anyio.current_time() - stale_since
                if waited_s > self._unavailable_timeout_s and not self._router.has_alternative(
                    engine, min_policy_version
                ):
                    raise EngineUnavailableError(f"{error}, for {waited_s:.3g} s; is the trainer there?") from error
                self._monitor.wait_for_weights(engine, error)
                continue
            except EngineError as error:
                tries += 1
                await self._record_failure(engine, min_policy_version, error, tries)
                if tries >= self._max_attempts:
                    raise await self._classify_failure(error, began, tries) from error
            else:
                self._router.record_affinity(wanted, engine)
                return sampled
            finally:
                self._router.release(engine)
            if not self._router.has_alternative(engine, min_policy_version):
                await back_off(tries)

    async def _record_failure(
        self, engine: EngineState, min_policy_version: int, error: EngineError, tries: int
    ) -> None:
        """Draw from a failure what it says of the engine."""
        if isinstance(error, UnreachableError):
            self._monitor.eject(engine, error)
            return
        log.warning("engine.request_failed", url=engine.url, tries=tries, why=str(error))
        if isinstance(error, RequestTimeoutError) and await self._is_paused(engine):
            return  # it is given new weights, which takes long
        self._monitor.record_failure(engine, min_policy_version, error)

    async def _is_paused(self, engine: EngineState) -> bool:
        """Whether somebody has frozen it."""
        try:
            return bool((await self._connection.get(f"{engine.url}/is_paused", dict[str, object])).get("is_paused"))
        except EngineError:
            return False

    async def _classify_failure(self, error: EngineError, began: float, tries: int) -> EngineError:
        """Is it this request, or the engine?"""
        answered = any(engine.answered_at > began for engine in self._router.engines.values())
        answering = answered or any([await self._monitor.check_health(engine) for engine in self._router.healthy])
        kind = EngineError if answering else EngineUnavailableError
        return kind(f"{tries} tries failed; the last: {error}")
