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
from dataclasses import replace
from types import TracebackType
from typing import Self

import anyio
import structlog

from envs.served.service import back_off, error_text
from stream.errors import EngineError, EngineRefusedError, EngineUnavailableError
from stream.records import Span
from workers.engine.wire import adapter_name
from workers.fleet.roster import Roster
from workers.rollout.engine.answer import NONE_YET, Sampled
from workers.rollout.engine.connection import Connection, SilentError, SlowError
from workers.rollout.engine.known_engine import KnownEngine
from workers.rollout.engine.lookout import Lookout
from workers.rollout.engine.places import Places, Wanted, outdated
from workers.rollout.engine.probe import ABSENT, Facts, Probe, UnfitError
from workers.rollout.engine.sampling import Sampling
from workers.settings import Settings
from workers.settings.engine import Engine

log = structlog.get_logger()


class _StaleError(EngineError):
    """What was sampled, or would have been, comes from weights that are too old."""


class EngineClient:
    """A connection to the engines of a run, all of the same policy; an async context manager.

    Args:
        engines: which there are: a roster, which is followed, or URLs.
        request_timeout_s: for one answer.
        attempts: tries of one request, while something answers.
        reconnect_s: how long to wait for an engine to answer, or to be given its weights.
        samplings: how the run samples, with which an engine is tried when it is met.
        adapters: engines are given adapters, one to a policy version, and asked for one by its name.
        concurrency: requests under way at one engine, at least and at most; how many, its own figures decide.
        salted: engines keep what older weights have computed, so each version's requests share cached prefixes apart.
    """

    def __init__(
        self,
        engines: Roster | Sequence[str],
        *,
        request_timeout_s: float,
        attempts: int,
        reconnect_s: float,
        samplings: Sequence[Sampling] = (),
        adapters: bool = False,
        concurrency: tuple[int, int] = (Engine().min_concurrency, Engine().max_concurrency),
        salted: bool = False,
    ) -> None:
        self.samplings = tuple(samplings)
        self._roster = engines if isinstance(engines, Roster) else Roster(engines)
        self._connection = Connection()
        self._probe = Probe(self._connection, samplings=samplings, timeout_s=request_timeout_s)
        self._places = Places(self._roster)
        self._concurrency = concurrency
        self._request_timeout_s = request_timeout_s
        self._attempts = attempts
        self._salted = salted
        self._reconnect_s = reconnect_s
        self._adapters = adapters
        self._succeeded_at = -math.inf

    @classmethod
    def of(cls, settings: Settings, engines: Roster | Sequence[str]) -> "EngineClient":
        """A client with a run's deadlines, bounds, and ways to sample."""
        played = [settings.rollout, *([settings.for_evaluation.rollout] if settings.eval.path else [])]
        return cls(
            engines,
            request_timeout_s=settings.engine.request_timeout_s,
            attempts=settings.engine.attempts,
            reconnect_s=settings.engine_patience_s,
            samplings=[Sampling.of(limits, max_tokens=limits.max_tokens) for limits in played],
            adapters=settings.publishes_adapters,
            concurrency=(settings.engine.min_concurrency, settings.engine.max_concurrency),
            salted=settings.weights.kv == "keep",
        )

    async def __aenter__(self) -> Self:
        await self._connection.__aenter__()
        self._tasks = await anyio.create_task_group().__aenter__()
        self._lookout = Lookout(
            *(self._roster, self._places, self._connection, self._probe, self._tasks, self._concurrency),
            health_s=self._reconnect_s,
        )
        self._lookout.sync(self._roster.urls)
        self._tasks.start_soon(self._lookout.follow_roster)
        self._tasks.start_soon(self._roster.watch)
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

    async def probe(self) -> None:
        """Wait until an engine answers, and see that each that does is fit for the run.

        Raises:
            EngineUnavailableError: nothing answered for `reconnect_s`.
            EngineError: what answers does not speak vLLM's API, or lacks what the run needs of it.
        """
        for engine in list(self._places.engines.values()):
            with anyio.move_on_after(self._reconnect_s):
                await engine.looked.wait()
            if isinstance(engine.problem, UnfitError):
                raise engine.problem
        self._places.give_back(await self._places.take(Wanted(NONE_YET), self._reconnect_s))

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
        began, tries = anyio.current_time(), 0
        failed: KnownEngine | None = None
        while True:
            wanted = Wanted(at_least, sampling.group, sampling.completion, failed)
            engine = failed = await self._places.take(wanted, self._reconnect_s)
            try:
                sampled = await self._ask_unless_silent(engine, prompt_ids, sampling, at_least)
            except EngineRefusedError:
                raise
            except _StaleError as error:
                self._lookout.lacks_weights(engine, error)
                continue
            except EngineError as error:
                tries += 1
                await self._note(engine, at_least, error, tries)
                if tries >= self._attempts:
                    raise await self._verdict(error, began, tries) from error
            else:
                self._places.remember(wanted, engine)
                return sampled
            finally:
                self._places.give_back(engine)
            if not self._places.elsewhere(engine, at_least):
                await back_off(tries)

    async def _note(self, engine: KnownEngine, at_least: int, error: EngineError, tries: int) -> None:
        """Draw from a failure what it says of the engine."""
        if isinstance(error, SilentError):
            self._lookout.eject(engine, error)
            return
        log.warning("engine.request_failed", url=engine.url, tries=tries, why=str(error))
        if isinstance(error, SlowError) and await self._is_paused(engine):
            return  # it is given new weights, which takes long
        self._lookout.request_failed(engine, at_least, error)

    async def _ask_unless_silent(
        self, engine: KnownEngine, prompt_ids: Sequence[int], sampling: Sampling, at_least: int
    ) -> Sampled:
        """One try on one engine, which ends when the engine is found to be silent."""
        with anyio.CancelScope() as scope:
            engine.requests.add(scope)
            try:
                return await self._ask(engine, prompt_ids, sampling, at_least)
            finally:
                engine.requests.discard(scope)
        raise SilentError(f"{engine.url} says nothing any more")

    async def _ask(self, engine: KnownEngine, prompt_ids: Sequence[int], sampling: Sampling, at_least: int) -> Sampled:
        """One try on one engine."""
        facts = engine.facts
        if facts is None:
            raise SilentError(f"{engine.url} was ejected")
        route = facts.route
        before = await self._version(engine, facts, at_least)
        if before < at_least:
            raise _StaleError(str(outdated(engine, at_least)))
        if facts.max_length:  # completions would refuse what generate cuts off
            sampling = sampling.within(facts.max_length - len(prompt_ids))
        adapter = self._adapters and before > NONE_YET
        # Where engines keep what older weights have computed, no request finds it in the cache.
        salt = f"v{before}" if self._salted else ""
        model = adapter_name(before) if adapter else facts.model
        body = route.body(prompt_ids, sampling, model=model, salt=salt)
        status, payload = await self._connection.send("POST", engine.url + route.path, self._request_timeout_s, body)
        if status in ABSENT:
            told = error_text(payload)
            if adapter and model in told:
                engine.spoke(NONE_YET)
                raise _StaleError(f"{engine.url} does not have the adapter {model} any more")
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
        self._succeeded_at = anyio.current_time()
        engine.answered()
        if sampled.spans[0].version < at_least:
            raise _StaleError(f"{engine.url} sampled with policy version {sampled.spans[0].version}, not {at_least}")
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

    async def _is_paused(self, engine: KnownEngine) -> bool:
        """Whether somebody has frozen it."""
        try:
            return bool((await self._connection.ask(f"{engine.url}/is_paused", dict[str, object])).get("is_paused"))
        except EngineError:
            return False

    async def _verdict(self, error: EngineError, began: float, tries: int) -> EngineError:
        """Is it this request, or the engine?"""
        there = self._places.there
        answering = self._succeeded_at > began or any([await self._lookout.check(engine) for engine in there])
        kind = EngineError if answering else EngineUnavailableError
        return kind(f"{tries} tries failed; the last: {error}")
