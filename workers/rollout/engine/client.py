"""The engine's client: prompt ids in, sampled ids with log-probs and policy versions out. No torch.

What may be wrong with an answer, and what is done about it::

    nothing answers                          wait until something does, `reconnect_s` at most   EngineUnavailableError
    500s, 429, 408, a time-out, junk,        try again with back-off, another engine first,
    an abort, counts that do not agree       `attempts` times                                   EngineError
    weights older than `at_least`            wait until they come, `reconnect_s` at most        EngineUnavailableError
    any other 4xx                            a fact about the request: never again              EngineRefusedError
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

import anyio
import structlog
from msgspec import Struct

from envs.served.service import back_off
from stream.errors import EngineError, EngineRefusedError, EngineUnavailableError
from stream.records import Span
from workers.engine.wire import adapter_name
from workers.rollout.engine.answer import NONE_YET, Sampled, version_number
from workers.rollout.engine.connection import QUESTION_S, Connection, SilentError
from workers.rollout.engine.known_engine import KnownEngine
from workers.rollout.engine.probe import Facts, Probe, UnfitError
from workers.rollout.engine.sampling import Sampling
from workers.settings import Settings

log = structlog.get_logger()

_NO_SUCH_MODEL = 404
_ASK_AGAIN_S = 0.5
"""Between two questions for an engine's version, however many requests wait for it."""


class _StaleError(EngineError):
    """What was sampled, or would have been, comes from weights that are too old."""


class _WeightInfo(Struct):
    weight_version: str | None = None


class EngineClient:
    """A connection to one engine, or to several of the same policy; an async context manager.

    Args:
        urls: servers that speak vLLM's protocol.
        request_timeout_s: for one answer.
        attempts: tries of one request, while something answers.
        reconnect_s: how long to wait for an engine to answer, or to be given its weights.
        samplings: how the run samples, with which an engine is tried when it is met.
        adapters: engines are given adapters, one to a policy version, and asked for one by its name.
        concurrency: requests under way at once.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        request_timeout_s: float,
        attempts: int,
        reconnect_s: float,
        samplings: Sequence[Sampling] = (),
        adapters: bool = False,
        concurrency: int = 512,
    ) -> None:
        self._connection = Connection()
        self._probe = Probe(self._connection, samplings=samplings, timeout_s=request_timeout_s)
        self._engines = [KnownEngine(url) for url in urls]
        self._request_timeout_s = request_timeout_s
        self._attempts = attempts
        self._reconnect_s = reconnect_s
        self._adapters = adapters
        self._room = anyio.CapacityLimiter(concurrency)
        self._looking = anyio.Lock()
        self._succeeded_at = self._healthy_at = self._silent_at = -math.inf

    @classmethod
    def of(cls, settings: Settings, urls: Sequence[str]) -> "EngineClient":
        """A client with a run's deadlines, and its ways to sample."""
        played = [settings.rollout, *([settings.for_evaluation.rollout] if settings.eval.path else [])]
        return cls(
            urls,
            request_timeout_s=settings.engine.request_timeout_s,
            attempts=settings.engine.attempts,
            reconnect_s=settings.engine_patience_s,
            samplings=[Sampling.of(limits, max_tokens=1) for limits in played],
            adapters=settings.publishes_adapters,
        )

    async def __aenter__(self) -> Self:
        await self._connection.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._connection.__aexit__(kind, error, trace)

    async def probe(self) -> None:
        """Wait until an engine answers, and see that each that does is fit for the run.

        Raises:
            EngineUnavailableError: nothing answered for `reconnect_s`.
            EngineError: what answers does not speak vLLM's API, or lacks what the run needs of it.
        """
        await self._find_healthy(anyio.current_time())
        for engine in self._engines:
            if await self._is_healthy(engine):
                await self._facts(engine)

    async def sample(self, prompt_ids: Sequence[int], sampling: Sampling, *, at_least: int = 0) -> Sampled:
        """Sample one turn. Cancelling the caller aborts it at the engine.

        Args:
            prompt_ids: the whole context.
            sampling: how to sample.
            at_least: the oldest policy version that may sample any of it; -1 for any engine, numbered or not.

        Raises:
            EngineRefusedError: a fact about this request; the message is the engine's.
            EngineError: this request fails while others succeed.
            EngineUnavailableError: nothing answers, or nobody has weights as new as `at_least`.
        """
        async with self._room:
            return await self._persist(prompt_ids, sampling, at_least)

    async def _persist(self, prompt_ids: Sequence[int], sampling: Sampling, at_least: int) -> Sampled:
        """Try until there is an answer, or a verdict."""
        began, tries = anyio.current_time(), 0
        failed: KnownEngine | None = None
        stale_since = math.inf
        while True:
            engine = min(self._engines, key=lambda e: (e is failed, e.load))
            asked_at = anyio.current_time()
            engine.load += 1
            try:
                waiting = stale_since < asked_at
                return await self._ask(engine, prompt_ids, sampling, at_least, waiting=waiting)
            except EngineRefusedError:
                raise
            except _StaleError as error:
                failed, stale_since = engine, min(stale_since, asked_at)
                engine.awaited("weights", error)
                if anyio.current_time() - stale_since > self._reconnect_s:
                    raise EngineUnavailableError(
                        f"{error}, for {self._reconnect_s:g} s; is the trainer there?"
                    ) from None
                await back_off(3)
                continue
            except EngineError as error:
                tries, failed = tries + 1, engine
                if isinstance(error, SilentError):
                    engine.awaited("answer", error)
                else:
                    log.warning("engine.request_failed", url=engine.url, tries=tries, why=str(error))
                # A server that is going down answers with 500s first: that is no fact about this request either.
                if isinstance(error, SilentError) or not await self._is_healthy(engine):
                    await self._find_healthy(asked_at)
                if tries >= self._attempts:
                    raise await self._verdict(error, began, tries) from error
            finally:
                engine.load -= 1
            await back_off(tries)

    async def _ask(
        self, engine: KnownEngine, prompt_ids: Sequence[int], sampling: Sampling, at_least: int, *, waiting: bool
    ) -> Sampled:
        """One try on one engine. A request that is `waiting` for weights makes do with what others were answered."""
        facts = await self._facts(engine)
        route = facts.route
        before = await self._version(engine, facts, at_least, waiting=waiting)
        if before < at_least:
            has = "no policy version yet" if before == NONE_YET else f"policy version {before}"
            raise _StaleError(f"{engine.url} has {has}, older than {at_least}")
        if facts.max_length:  # completions would refuse what generate cuts off
            sampling = sampling.within(facts.max_length - len(prompt_ids))
        adapter = self._adapters and before > NONE_YET
        body = route.body(prompt_ids, sampling, model=adapter_name(before) if adapter else facts.model)
        status, payload = await self._connection.send("POST", engine.url + route.path, self._request_timeout_s, body)
        if adapter and status == _NO_SUCH_MODEL:
            engine.spoke(NONE_YET)
            raise _StaleError(f"{engine.url} does not have the adapter {adapter_name(before)} any more")
        after = before
        if status == 200 and facts.versioned and not facts.spans:
            after = await self._ask_version(engine)
        sampled = route.read(status, payload, engine.url, version=min(before, after))
        if facts.spans:
            engine.spoke(sampled.spans[-1].version)
        if adapter:  # it samples all of a request, whatever came meanwhile
            sampled = replace(sampled, spans=[Span(before, 0, len(sampled.token_ids))])
        self._succeeded_at = anyio.current_time()
        if sampled.spans[0].version < at_least:
            raise _StaleError(f"{engine.url} sampled with policy version {sampled.spans[0].version}, not {at_least}")
        engine.came("answer")
        engine.came("weights")
        return sampled

    async def _version(self, engine: KnownEngine, facts: Facts, at_least: int, *, waiting: bool) -> int:
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
        if waiting and anyio.current_time() - engine.asked_at <= _ASK_AGAIN_S:
            return engine.version
        return await self._ask_version(engine)

    async def _ask_version(self, engine: KnownEngine) -> int:
        engine.asked_at = anyio.current_time()
        info = await self._connection.ask(engine.url + "/weight_info", _WeightInfo)
        engine.spoke(version_number(info.weight_version))
        return engine.version

    async def _facts(self, engine: KnownEngine) -> Facts:
        """What the engine is; asked when it is met, and again when it was silent."""
        async with engine.looking:
            if engine.facts is None:
                engine.facts = await self._probe.look(engine.url)
            return engine.facts

    async def _verdict(self, error: EngineError, began: float, tries: int) -> EngineError:
        """Is it this request, or the engine?"""
        answering = self._succeeded_at > began or any([await self._is_healthy(engine) for engine in self._engines])
        kind = EngineError if answering else EngineUnavailableError
        return kind(f"{tries} tries failed; the last: {error}")

    async def _find_healthy(self, since: float) -> None:
        """Wait until an engine answers; many may wait, one looks.

        Raises:
            EngineUnavailableError: nothing has answered from `since` on for `reconnect_s`.
        """
        tries = 0
        async with self._looking:
            if self._healthy_at > since:
                return
            while self._silent_at <= since:
                for engine in self._engines:
                    if await self._is_healthy(engine):
                        self._healthy_at = anyio.current_time()
                        return
                tries += 1
                if anyio.current_time() - since > self._reconnect_s:
                    self._silent_at = anyio.current_time()
                await back_off(tries)
        urls = ", ".join(engine.url for engine in self._engines)
        raise EngineUnavailableError(f"no engine answers at {urls}; tried for {self._reconnect_s:g} s")

    async def _is_healthy(self, engine: KnownEngine) -> bool:
        try:
            status, _ = await self._connection.send("GET", engine.url + "/health", min(QUESTION_S, self._reconnect_s))
        except EngineError as error:
            engine.awaited("answer", error)
            return False
        if status != 200:
            engine.awaited("answer", EngineError(f"{engine.url}/health answers {status}"))
            return False
        engine.came("answer")
        return True
