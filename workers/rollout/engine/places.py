"""The places at the engines of a run, and the requests that wait for one. Nothing here speaks to an engine.

A request is given a place at the engine that `choice.py` finds for it. Where all places are taken, it waits for one;
then a place goes to the first of those waiting whose prefix that engine has, or else to the one that has waited
longest, so that neither a cache nor a place is wasted.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import anyio

from stream.errors import EngineError, EngineUnavailableError
from workers.fleet.roster import Roster
from workers.rollout.engine.answer import NONE_YET
from workers.rollout.engine.choice import choose, ranking
from workers.rollout.engine.known_engine import KnownEngine

_REMEMBERED: Final = 16_384
"""Completions whose last engine is known: more than a worker has under way."""
_WINDOW: Final = 64
"""Requests, from the one that has waited longest, among which one is sought that suits a place best."""
_PASSED_BY: Final = 64
"""How often a request lets a better suited one go before it."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request asks of an engine."""

    at_least: int
    """The oldest policy version that may sample it."""
    group: str = ""
    """Whose request it is; empty: nobody's."""
    completion: int = 0
    """Index within the group."""
    avoid: KnownEngine | None = None
    """The engine at which it failed: only where there is no other."""


@dataclass(eq=False, slots=True)
class _Waiting:
    wanted: Wanted
    given: anyio.Event = field(default_factory=anyio.Event)
    engine: KnownEngine | None = None
    passed_by: int = 0


class Places:
    """The engines that a client knows by URL, and who may ask which."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self.engines: dict[str, KnownEngine] = {}
        self._waiting: deque[_Waiting] = deque()
        self._last: OrderedDict[tuple[str, int], str] = OrderedDict()

    @property
    def there(self) -> list[KnownEngine]:
        """Engines that answer."""
        return [engine for engine in self.engines.values() if engine.facts is not None]

    def queueing(self, engine: KnownEngine) -> bool:
        """Whether a request waits that this engine could take, had it a place."""
        return any(engine.may_take(waiting.wanted.at_least) for waiting in self._waiting)

    def elsewhere(self, engine: KnownEngine, at_least: int) -> bool:
        """Whether another engine could be asked."""
        return any(other is not engine and other.may_take(at_least) for other in self.engines.values())

    async def take(self, wanted: Wanted, patience_s: float) -> KnownEngine:
        """Wait for a place; to be given back with `give_back`.

        Args:
            wanted: what is asked of the engine.
            patience_s: how long there may be no engine that could be asked.

        Raises:
            EngineUnavailableError: there was none for so long.
        """
        if not self._waiting and (engine := self._choose(wanted)):
            engine.begin()
            return engine
        waiting = _Waiting(wanted)
        self._waiting.append(waiting)
        self.hand_out()
        try:
            while waiting.engine is None:
                with anyio.move_on_after(patience_s):
                    await waiting.given.wait()
                if waiting.engine is None:
                    self._raise_if_hopeless(wanted.at_least, patience_s)
        except BaseException:
            if waiting.engine is None:
                self._waiting.remove(waiting)
            else:
                self.give_back(waiting.engine)
            raise
        return waiting.engine

    def give_back(self, engine: KnownEngine) -> None:
        """The request has ended."""
        engine.end()
        self.hand_out()

    def remember(self, wanted: Wanted, engine: KnownEngine) -> None:
        """This engine has the completion's tokens in its cache."""
        if wanted.group:
            key = wanted.group, wanted.completion
            self._last[key] = engine.url
            self._last.move_to_end(key)
            if len(self._last) > _REMEMBERED:
                self._last.popitem(last=False)

    def hand_out(self) -> None:
        """Give out the places that there are: call it when one came free, or an engine came."""
        while self._waiting:
            free = {url for url, engine in self.engines.items() if engine.load < engine.concurrency.limit}
            waiting = self._next(free) if free else None
            if waiting is None:
                return
            engine = self._choose(waiting.wanted)
            if engine is None:
                return
            self._waiting.remove(waiting)
            engine.begin()
            waiting.engine = engine
            waiting.given.set()

    def _next(self, free: set[str]) -> _Waiting | None:
        """Who is to be given one of the free engines, if anybody may be."""
        first: _Waiting | None = None
        able: dict[int, tuple[str, ...]] = {}
        for place, waiting in enumerate(self._waiting):
            if first is not None and (place >= _WINDOW or first.passed_by >= _PASSED_BY):
                break
            wanted = waiting.wanted
            if wanted.at_least not in able:
                able[wanted.at_least] = tuple(engine.url for engine in self._able(wanted.at_least))
            urls = able[wanted.at_least]
            if free.isdisjoint(urls):
                continue
            first = first or waiting
            last = self._last.get((wanted.group, wanted.completion), "")
            if not wanted.group or (last if last in urls else ranking(wanted.group, urls)[0]) in free:
                if waiting is not first:
                    first.passed_by += 1
                return waiting
        return first

    def _choose(self, wanted: Wanted) -> KnownEngine | None:
        """The engine for a request; None where no engine that could be asked has a place."""
        last = self._last.get((wanted.group, wanted.completion), "")
        seats = [engine.seat for engine in self._able(wanted.at_least)]
        if wanted.avoid is not None:
            others = [seat for seat in seats if seat.url != wanted.avoid.url]
            if others and (url := choose(wanted.group, last, others)):
                return self.engines[url]
        url = choose(wanted.group, last, seats)
        return self.engines[url] if url else None

    def _able(self, at_least: int) -> Iterator[KnownEngine]:
        return (engine for engine in self.engines.values() if engine.may_take(at_least))

    def _raise_if_hopeless(self, at_least: int, waited_s: float) -> None:
        """Give up where no engine could be asked; else there are only no places yet."""
        if any(self._able(at_least)):
            return
        if not self.engines:
            raise EngineUnavailableError(self._roster.why_empty)
        if self.there:
            old = "; ".join(str(outdated(engine, at_least)) for engine in self.there)
            raise EngineUnavailableError(f"{old}, for {waited_s:g} s; is the trainer there?")
        problems = sorted({str(engine.problem) for engine in self.engines.values() if engine.problem})
        why = f" ({'; '.join(problems)})" if problems else ""
        raise EngineUnavailableError(f"no engine answers at {', '.join(self.engines)}; tried for {waited_s:g} s{why}")


def outdated(engine: KnownEngine, at_least: int) -> EngineError:
    """That its weights are too old."""
    has = "no policy version yet" if engine.version == NONE_YET else f"policy version {engine.version}"
    return EngineError(f"{engine.url} has {has}, older than {at_least}")
