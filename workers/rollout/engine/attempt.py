"""One try at one engine: what it is asked, and what its answer tells of its weights."""

from collections.abc import Sequence
from dataclasses import replace

import anyio

from envs.served.service import error_text
from stream.errors import EngineError
from stream.records import Span
from workers.engine.connection import Connection, SilentError
from workers.engine.wire import adapter_name
from workers.rollout.engine.answer import NONE_YET, Sampled, UnfitError
from workers.rollout.engine.known_engine import KnownEngine
from workers.rollout.engine.lookout import Lookout
from workers.rollout.engine.places import outdated
from workers.rollout.engine.probe import ABSENT, Facts
from workers.rollout.engine.route import Request
from workers.rollout.engine.sampling import Sampling


class StaleError(EngineError):
    """What was sampled, or would have been, comes from weights that are too old."""


class Attempt:
    """How an engine is asked for a turn, once.

    Args:
        connection: the way to engines.
        lookout: hears what they say of their versions.
        timeout_s: for one answer.
        adapters: engines are given adapters, one to a policy version, and asked for one by its name.
        salted: engines keep what older weights have computed, so each version's requests share cached prefixes apart.
    """

    def __init__(
        self, connection: Connection, lookout: Lookout, *, timeout_s: float, adapters: bool, salted: bool
    ) -> None:
        self._connection, self._lookout = connection, lookout
        self._timeout_s = timeout_s
        self._adapters, self._salted = adapters, salted

    async def ask(self, engine: KnownEngine, prompt_ids: Sequence[int], sampling: Sampling, at_least: int) -> Sampled:
        """Sample one turn there; ends when the engine is found to be silent.

        Args:
            engine: whom to ask.
            prompt_ids: the whole context.
            sampling: how to sample.
            at_least: the oldest policy version that may sample any of it.

        Raises:
            StaleError: its weights are older.
            SilentError: nothing answers any more.
            EngineRefusedError: a fact about this request.
            EngineError: any other failure.
        """
        with anyio.CancelScope() as scope:
            engine.requests.add(scope)
            try:
                return await self._ask(engine, prompt_ids, sampling, at_least)
            finally:
                engine.requests.discard(scope)
        raise SilentError(f"{engine.url} says nothing any more")

    async def _ask(self, engine: KnownEngine, prompt_ids: Sequence[int], sampling: Sampling, at_least: int) -> Sampled:
        facts = engine.facts
        if facts is None:
            raise SilentError(f"{engine.url} was ejected")
        route = facts.route
        before = await self._version(engine, facts, at_least)
        if before < at_least:
            raise StaleError(str(outdated(engine, at_least)))
        if facts.max_length:  # completions would refuse what generate cuts off
            sampling = sampling.within(facts.max_length - len(prompt_ids))
        adapter = self._adapters and before > NONE_YET
        # Where engines keep what older weights have computed, no request finds it in the cache.
        salt = f"v{before}" if self._salted else ""
        model = adapter_name(before) if adapter else facts.model
        body = route.body(Request(prompt_ids, sampling, model=model, salt=salt))
        status, payload = await self._connection.send("POST", engine.url + route.path, self._timeout_s, body)
        if status in ABSENT:
            told = error_text(payload)
            if adapter and model in told:
                engine.spoke(NONE_YET)
                raise StaleError(f"{engine.url} does not have the adapter {model} any more")
            raise SilentError(f"{engine.url}{route.path} was open, and answers {status} now, as another server: {told}")
        after = before
        if status == 200 and facts.versioned and not facts.spans:
            after = await self._lookout.version(engine)
        sampled = route.read(status, payload, engine.url, version=min(before, after))
        last = sampled.spans[-1].version
        if facts.spans and not (adapter and last < engine.version):  # a request may end as a newer adapter comes
            self._lookout.heard(engine, last)
        if adapter:  # it samples all of a request, whatever came meanwhile
            sampled = replace(sampled, spans=[Span(before, 0, len(sampled.token_ids))])
        engine.answered()
        if sampled.spans[0].version < at_least:
            raise StaleError(f"{engine.url} sampled with policy version {sampled.spans[0].version}, not {at_least}")
        engine.came("weights")
        return sampled

    async def _version(self, engine: KnownEngine, facts: Facts, at_least: int) -> int:
        """The version that it has before it is asked: as it last said, or, where that will not do, as it says now."""
        if not facts.versioned:
            if at_least > NONE_YET:
                raise UnfitError(
                    f"{engine.url} does not say which policy version it has: /weight_info is not there; start vLLM "
                    "with VLLM_SERVER_DEV_MODE=1 in its environment, on a network that you trust"
                )
            return NONE_YET
        if facts.spans and engine.has(at_least):
            return engine.version
        return await self._lookout.version(engine)
