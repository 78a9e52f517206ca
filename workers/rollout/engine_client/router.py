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
from workers.engine_api.discovery.discovery import EngineDiscovery
from workers.rollout.engine_client.affinity import choose_engine, rank_engines
from workers.rollout.engine_client.engine_state import EngineState
from workers.rollout.engine_client.sampled_turn import UNVERSIONED

_MAX_AFFINITIES: Final = 16_384
"""Completions whose last engine is known: more than a worker has under way."""
_WINDOW: Final = 64
"""Requests, from the one that has waited longest, among which one is sought that suits a place best."""
_MAX_SKIPS: Final = 64
"""How often a request lets a better suited one go before it."""


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What a request asks of an engine."""

    min_policy_version: int
    """The oldest policy version that may sample it."""
    group: str = ""
    """Whose request it is; empty: nobody's."""
    completion: int = 0
    """Index within the group."""
    avoid: EngineState | None = None
    """The engine at which it failed: only where there is no other."""


@dataclass(eq=False, slots=True)
class _Waiting:
    request: RouteRequest
    assigned: anyio.Event = field(default_factory=anyio.Event)
    engine: EngineState | None = None
    times_skipped: int = 0


class Router:
    """The engines that a client knows by URL, and who may ask which."""

    def __init__(self, discovery: EngineDiscovery) -> None:
        self._discovery = discovery
        self.engines: dict[str, EngineState] = {}
        self._waiting: deque[_Waiting] = deque()
        self._last_engine: OrderedDict[tuple[str, int], str] = OrderedDict()

    @property
    def healthy(self) -> list[EngineState]:
        """Engines that answer."""
        return [engine for engine in self.engines.values() if engine.capabilities is not None]

    def has_waiting_for(self, engine: EngineState) -> bool:
        """Whether a request waits that this engine could take, had it a place."""
        return any(engine.can_serve(waiting.request.min_policy_version) for waiting in self._waiting)

    def has_alternative(self, engine: EngineState, min_policy_version: int) -> bool:
        """Whether another engine could be asked."""
        return any(other is not engine and other.can_serve(min_policy_version) for other in self.engines.values())

    async def acquire(self, request: RouteRequest, timeout_s: float) -> EngineState:
        """Wait for a place; to be given back with `give_back`.

        Args:
            request: what is asked of the engine.
            timeout_s: how long there may be no engine that could be asked.

        Raises:
            EngineUnavailableError: there was none for so long.
        """
        if not self._waiting and (engine := self._choose(request)):
            engine.start_request()
            return engine
        waiting = _Waiting(request)
        self._waiting.append(waiting)
        self.dispatch()
        try:
            while waiting.engine is None:
                with anyio.move_on_after(timeout_s):
                    await waiting.assigned.wait()
                if waiting.engine is None:
                    self._raise_if_none_eligible(request.min_policy_version, timeout_s)
        except BaseException:
            if waiting.engine is None:
                self._waiting.remove(waiting)
            else:
                self.release(waiting.engine)
            raise
        return waiting.engine

    def release(self, engine: EngineState) -> None:
        """The request has ended."""
        engine.finish_request()
        self.dispatch()

    def record_affinity(self, request: RouteRequest, engine: EngineState) -> None:
        """This engine has the completion's tokens in its cache."""
        if request.group:
            key = request.group, request.completion
            self._last_engine[key] = engine.url
            self._last_engine.move_to_end(key)
            if len(self._last_engine) > _MAX_AFFINITIES:
                self._last_engine.popitem(last=False)

    def dispatch(self) -> None:
        """Give out the places that there are: call it when one came free, or an engine came."""
        while self._waiting:
            free = {url for url, engine in self.engines.items() if engine.load < engine.limit.limit}
            waiting = self._next_waiting(free) if free else None
            if waiting is None:
                return
            engine = self._choose(waiting.request)
            if engine is None:
                return
            self._waiting.remove(waiting)
            engine.start_request()
            waiting.engine = engine
            waiting.assigned.set()

    def _next_waiting(self, free: set[str]) -> _Waiting | None:
        """Who is to be given one of the free engines, if anybody may be."""
        first: _Waiting | None = None
        eligible_urls: dict[int, tuple[str, ...]] = {}
        for place, waiting in enumerate(self._waiting):
            if first is not None and (place >= _WINDOW or first.times_skipped >= _MAX_SKIPS):
                break
            request = waiting.request
            if request.min_policy_version not in eligible_urls:
                eligible_urls[request.min_policy_version] = tuple(
                    engine.url for engine in self._eligible(request.min_policy_version)
                )
            urls = eligible_urls[request.min_policy_version]
            if free.isdisjoint(urls):
                continue
            first = first or waiting
            last = self._last_engine.get((request.group, request.completion), "")
            if not request.group or (last if last in urls else rank_engines(request.group, urls)[0]) in free:
                if waiting is not first:
                    first.times_skipped += 1
                return waiting
        return first

    def _choose(self, request: RouteRequest) -> EngineState | None:
        """The engine for a request; None where no engine that could be asked has a place."""
        last = self._last_engine.get((request.group, request.completion), "")
        candidates = [engine.candidate for engine in self._eligible(request.min_policy_version)]
        if request.avoid is not None:
            others = [seat for seat in candidates if seat.url != request.avoid.url]
            if others and (url := choose_engine(request.group, last, others)):
                return self.engines[url]
        url = choose_engine(request.group, last, candidates)
        return self.engines[url] if url else None

    def _eligible(self, min_policy_version: int) -> Iterator[EngineState]:
        return (engine for engine in self.engines.values() if engine.can_serve(min_policy_version))

    def _raise_if_none_eligible(self, min_policy_version: int, waited_s: float) -> None:
        """Give up where no engine could be asked; else there are only no places yet."""
        if any(self._eligible(min_policy_version)):
            return
        if not self.engines:
            raise EngineUnavailableError(self._discovery.empty_reason)
        if self.healthy:
            old = "; ".join(str(outdated_error(engine, min_policy_version)) for engine in self.healthy)
            raise EngineUnavailableError(f"{old}, for {waited_s:g} s; is the trainer there?")
        problems = sorted({str(engine.problem) for engine in self.engines.values() if engine.problem})
        why = f" ({'; '.join(problems)})" if problems else ""
        raise EngineUnavailableError(f"no engine answers at {', '.join(self.engines)}; tried for {waited_s:g} s{why}")


def outdated_error(engine: EngineState, min_policy_version: int) -> EngineError:
    """That its weights are too old."""
    has = "no policy version yet" if engine.version == UNVERSIONED else f"policy version {engine.version}"
    return EngineError(f"{engine.url} has {has}, older than {min_policy_version}")
