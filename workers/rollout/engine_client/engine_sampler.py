"""Sample one turn at one given engine, once: one request, and what its answer says about the engine's weights."""

import time
from collections.abc import Sequence
from functools import partial

import anyio
from msgspec.structs import replace

from envs.remote.service_client import error_message
from stream.errors import EngineError
from stream.records import Span
from workers.engine_api.connection_pool import ConnectionPool, UnreachableError
from workers.engine_api.wire import adapter_name
from workers.role.prometheus import engine_failures, engine_latency, sampled_tokens
from workers.rollout.engine_client.engine_state import EngineState
from workers.rollout.engine_client.health import HealthMonitor
from workers.rollout.engine_client.probe import ABSENT, Capabilities
from workers.rollout.engine_client.sampling import UNVERSIONED, IncompatibleEngineError, SampledTurn, SamplingOptions
from workers.rollout.engine_client.sampling_apis import SamplingRequest

_LONG_ANSWER_BYTES = 200_000
"""Some 4,000 tokens. Longer answers are decoded in a thread: 100,000 tokens take more than 0.1 s, in which the event
loop would renew no lease, and the completions of a group often end together."""


class StaleWeightsError(EngineError):
    """The engine's weights are older than the request allows."""


class EngineSampler:
    """Sends single requests.

    Args:
        connections: HTTP connections.
        monitor: asks engines for their version.
        timeout_s: for one answer.
        uses_adapters: each policy version is an adapter; engines that do not merge it are asked for it by name.
        salts_prefix_cache: engines keep KV blocks that older weights computed; a salt per version keeps them apart.
    """

    def __init__(
        self,
        connections: ConnectionPool,
        monitor: HealthMonitor,
        *,
        timeout_s: float,
        uses_adapters: bool,
        salts_prefix_cache: bool,
    ) -> None:
        self._connections, self._monitor = connections, monitor
        self._timeout_s = timeout_s
        self._uses_adapters, self._salts_prefix_cache = uses_adapters, salts_prefix_cache
        self._long_answers = anyio.CapacityLimiter(1)  # more threads would only compete for the interpreter

    async def sample(
        self, engine: EngineState, prompt_ids: Sequence[int], options: SamplingOptions, min_policy_version: int
    ) -> SampledTurn:
        """Sample one turn; ends early if the engine is ejected for not answering.

        Args:
            engine: where to send the request.
            prompt_ids: the whole context.
            options: how to sample.
            min_policy_version: oldest policy version that may sample any token.

        Raises:
            StaleWeightsError: the engine's weights are older.
            UnreachableError: the engine stopped answering.
            EngineRefusedError: the engine refuses this request.
            EngineError: any other failure.
        """
        started = time.perf_counter()
        try:
            sampled = await self._request(engine, prompt_ids, options, min_policy_version)
            engine.record_success()
            first = sampled.spans[0].version
            if first < min_policy_version:
                raise StaleWeightsError(f"{engine.url} sampled with policy version {first}, not {min_policy_version}")
        except EngineError as error:
            engine_failures.labels(type(error).__name__).inc()
            raise
        engine.availability.log_recovered("weights")
        engine_latency.observe(time.perf_counter() - started)
        sampled_tokens.inc(len(sampled.token_ids))
        return sampled

    async def _request(
        self, engine: EngineState, prompt_ids: Sequence[int], options: SamplingOptions, min_policy_version: int
    ) -> SampledTurn:
        capabilities = engine.capabilities
        if capabilities is None:
            raise UnreachableError(f"{engine.url} was ejected")
        api = capabilities.api
        version = self._known_version(engine, capabilities, min_policy_version)
        if version is None:
            version = await self._monitor.version_after_now(engine)
        if version < min_policy_version:
            raise StaleWeightsError(str(engine.outdated_error(min_policy_version)))
        if capabilities.max_length:  # the completions route would refuse what the generate route cuts off
            options = options.capped(capabilities.max_length - len(prompt_ids))
        names_adapter = self._uses_adapters and not capabilities.merges_adapters and version > UNVERSIONED
        adapter = adapter_name(version) if names_adapter else ""
        salt = f"v{version}" if self._salts_prefix_cache else ""
        request = SamplingRequest(prompt_ids, options, model=adapter or capabilities.model, cache_salt=salt)
        body = api.encode(request)
        status, payload = await self._connections.request("POST", engine.url + api.path, self._timeout_s, body)
        if status in ABSENT:
            raise _absence_error(engine, api.path, status, error_message(payload), adapter)
        version_after = version
        if status == 200 and capabilities.reports_version and not capabilities.reports_spans:
            version_after = await self._monitor.version_after_now(engine)
        decode = partial(api.decode, status, payload, engine.url, version=min(version, version_after))
        if len(payload) < _LONG_ANSWER_BYTES:
            sampled = decode()
        else:
            sampled = await anyio.to_thread.run_sync(decode, limiter=self._long_answers)
        last = sampled.spans[-1].version
        # A request for an adapter may end after a newer adapter was loaded; its version is then not the engine's.
        if capabilities.reports_spans and not (adapter and last < engine.version):
            engine.record_version(last)
        if adapter:  # the named adapter sampled the whole turn, even if another one was loaded meanwhile
            sampled = replace(sampled, spans=[Span(version, 0, len(sampled.token_ids))])
        return sampled

    def _known_version(self, engine: EngineState, capabilities: Capabilities, min_policy_version: int) -> int | None:
        """Return the engine's last reported version; None if it has to be asked before the request."""
        if not capabilities.reports_version:
            if min_policy_version > UNVERSIONED:
                raise IncompatibleEngineError(
                    f"{engine.url} does not say which policy version it has: it has no /weight_info; start vLLM with "
                    "VLLM_SERVER_DEV_MODE=1 in its environment, on a network that you trust"
                )
            return UNVERSIONED
        if capabilities.reports_spans:
            is_known = engine.has_version(min_policy_version)
        else:
            is_known = engine.has_had_version(min_policy_version, self._connections.connection_epoch(engine.url))
        return engine.version if is_known else None


def _absence_error(engine: EngineState, path: str, status: int, message: str, adapter: str) -> EngineError:
    """Interpret the answer of a route that is not there: the adapter is gone, or the whole server is another one."""
    if adapter and adapter in message:
        engine.forget_version()
        return StaleWeightsError(f"{engine.url} does not have the adapter {adapter} any more")
    return UnreachableError(f"{engine.url}{path} was open, and answers {status} now, as another server: {message}")
