"""One try at one engine: what it is asked, and what its answer tells of its weights."""

from collections.abc import Sequence
from dataclasses import replace

import anyio

from envs.remote.service_client import error_message
from stream.errors import EngineError
from stream.records import Span
from workers.engine_api.connection import ConnectionPool, UnreachableError
from workers.engine_api.wire import adapter_name
from workers.rollout.engine_client.engine_state import EngineState
from workers.rollout.engine_client.health import HealthMonitor
from workers.rollout.engine_client.probe import ABSENT, Capabilities
from workers.rollout.engine_client.router import outdated_error
from workers.rollout.engine_client.sampled_turn import UNVERSIONED, IncompatibleEngineError, SampledTurn
from workers.rollout.engine_client.sampling import SamplingOptions
from workers.rollout.engine_client.sampling_api import SamplingRequest


class StaleWeightsError(EngineError):
    """What was sampled, or would have been, comes from weights that are too old."""


class Attempt:
    """How an engine is asked for a turn, once.

    Args:
        connection: the way to engines.
        monitor: hears what they say of their versions.
        timeout_s: for one answer.
        uses_adapters: engines are given adapters, one to a policy version, and asked for one by its name.
        salts_prefix_cache: engines keep what older weights have computed, so each version's requests share cached
            prefixes apart.
    """

    def __init__(
        self,
        connection: ConnectionPool,
        monitor: HealthMonitor,
        *,
        timeout_s: float,
        uses_adapters: bool,
        salts_prefix_cache: bool,
    ) -> None:
        self._connection, self._monitor = connection, monitor
        self._timeout_s = timeout_s
        self._uses_adapters, self._salts_prefix_cache = uses_adapters, salts_prefix_cache

    async def sample(
        self, engine: EngineState, prompt_ids: Sequence[int], sampling: SamplingOptions, min_policy_version: int
    ) -> SampledTurn:
        """Sample one turn there; ends when the engine is found to be silent.

        Args:
            engine: whom to ask.
            prompt_ids: the whole context.
            sampling: how to sample.
            min_policy_version: the oldest policy version that may sample any of it.

        Raises:
            StaleWeightsError: its weights are older.
            UnreachableError: nothing answers any more.
            EngineRefusedError: a fact about this request.
            EngineError: any other failure.
        """
        with anyio.CancelScope() as scope:
            engine.request_scopes.add(scope)
            try:
                return await self._sample(engine, prompt_ids, sampling, min_policy_version)
            finally:
                engine.request_scopes.discard(scope)
        raise UnreachableError(f"{engine.url} says nothing any more")

    async def _sample(
        self, engine: EngineState, prompt_ids: Sequence[int], sampling: SamplingOptions, min_policy_version: int
    ) -> SampledTurn:
        facts = engine.capabilities
        if facts is None:
            raise UnreachableError(f"{engine.url} was ejected")
        route = facts.api
        before = await self._version(engine, facts, min_policy_version)
        if before < min_policy_version:
            raise StaleWeightsError(str(outdated_error(engine, min_policy_version)))
        if facts.max_length:  # completions would refuse what generate cuts off
            sampling = sampling.capped(facts.max_length - len(prompt_ids))
        adapter = self._uses_adapters and before > UNVERSIONED
        # Where engines keep what older weights have computed, no request finds it in the cache.
        salt = f"v{before}" if self._salts_prefix_cache else ""
        model = adapter_name(before) if adapter else facts.model
        body = route.encode(SamplingRequest(prompt_ids, sampling, model=model, cache_salt=salt))
        status, payload = await self._connection.request("POST", engine.url + route.path, self._timeout_s, body)
        if status in ABSENT:
            told = error_message(payload)
            if adapter and model in told:
                engine.record_version(UNVERSIONED)
                raise StaleWeightsError(f"{engine.url} does not have the adapter {model} any more")
            raise UnreachableError(
                f"{engine.url}{route.path} was open, and answers {status} now, as another server: {told}"
            )
        after = before
        if status == 200 and facts.reports_version and not facts.reports_spans:
            after = await self._monitor.fetch_version(engine)
        sampled = route.decode(status, payload, engine.url, version=min(before, after))
        last = sampled.spans[-1].version
        if facts.reports_spans and not (
            adapter and last < engine.version
        ):  # a request may end as a newer adapter comes
            self._monitor.record_version(engine, last)
        if adapter:  # it samples all of a request, whatever came meanwhile
            sampled = replace(sampled, spans=[Span(before, 0, len(sampled.token_ids))])
        engine.record_success()
        if sampled.spans[0].version < min_policy_version:
            raise StaleWeightsError(
                f"{engine.url} sampled with policy version {sampled.spans[0].version}, not {min_policy_version}"
            )
        engine.log_recovered("weights")
        return sampled

    async def _version(self, engine: EngineState, facts: Capabilities, min_policy_version: int) -> int:
        """The version that it has before it is asked: as it last said, or, where that will not do, as it says now."""
        if not facts.reports_version:
            if min_policy_version > UNVERSIONED:
                raise IncompatibleEngineError(
                    f"{engine.url} does not say which policy version it has: /weight_info is not there; start vLLM "
                    "with VLLM_SERVER_DEV_MODE=1 in its environment, on a network that you trust"
                )
            return UNVERSIONED
        if facts.reports_spans and engine.has_version(min_policy_version):
            return engine.version
        return await self._monitor.fetch_version(engine)
