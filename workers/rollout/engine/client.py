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

from envs.served.service import back_off
from stream.errors import EngineError, EngineRefusedError, EngineUnavailableError
from workers.engine.connection import Connection, SilentError, SlowError
from workers.fleet.roster import Roster
from workers.rollout.engine.answer import NONE_YET, Sampled, UnfitError
from workers.rollout.engine.attempt import Attempt, StaleError
from workers.rollout.engine.known_engine import KnownEngine
from workers.rollout.engine.lookout import Lookout
from workers.rollout.engine.places import Places, Wanted
from workers.rollout.engine.probe import Probe
from workers.rollout.engine.sampling import Sampling
from workers.settings import Settings
from workers.settings.engine import Engine

log = structlog.get_logger()


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
        self._attempt_of = partial(Attempt, timeout_s=request_timeout_s, adapters=adapters, salted=salted)
        self._attempts = attempts
        self._reconnect_s = reconnect_s

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
        self._attempt = self._attempt_of(self._connection, self._lookout)
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
        stale_since = math.inf
        failed: KnownEngine | None = None
        while True:
            wanted = Wanted(at_least, sampling.group, sampling.completion, failed)
            engine = failed = await self._places.take(wanted, self._reconnect_s)
            try:
                sampled = await self._attempt.ask(engine, prompt_ids, sampling, at_least)
            except EngineRefusedError:
                raise
            except StaleError as error:
                stale_since = min(stale_since, anyio.current_time())
                waited_s = anyio.current_time() - stale_since
                if waited_s > self._reconnect_s and not self._places.elsewhere(engine, at_least):
                    raise EngineUnavailableError(f"{error}, for {waited_s:.3g} s; is the trainer there?") from error
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

    async def _is_paused(self, engine: KnownEngine) -> bool:
        """Whether somebody has frozen it."""
        try:
            return bool((await self._connection.ask(f"{engine.url}/is_paused", dict[str, object])).get("is_paused"))
        except EngineError:
            return False

    async def _verdict(self, error: EngineError, began: float, tries: int) -> EngineError:
        """Is it this request, or the engine?"""
        answered = any(engine.answered_at > began for engine in self._places.engines.values())
        answering = answered or any([await self._lookout.check(engine) for engine in self._places.there])
        kind = EngineError if answering else EngineUnavailableError
        return kind(f"{tries} tries failed; the last: {error}")
