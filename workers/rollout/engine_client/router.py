"""Route requests to engines, and queue them while every suitable engine is at its limit. Sends nothing itself.

A request goes to the engine that `affinity.choose_engine` selects. If all are full, it waits; when an engine has a free
slot, that goes to the first waiting request whose prefix the engine has cached, otherwise to the one that has waited
longest. So neither a cache nor a slot is wasted.

Choose the engine for a request: the one with its prefix in the cache, unless that one has much more to do.

All completions of a group start with the same tokens, and each turn of a completion starts with the previous turns. So
a completion stays with the engine that sampled its last turn, and a group has a preferred engine: rendezvous hashing
ranks the engines for each group, so adding or removing an engine moves only the groups that it ranks first for. Both
give way to load: an engine gets no request that would bring it above a factor of the mean load plus `SLACK`, while
another engine has less to do. A completion that moves at its first turn costs one prompt that others read too; one that
moves later costs its whole history. So `FIRST_TURN_FACTOR` is the smaller one.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Final

import anyio
from msgspec import Struct

from stream.errors import EngineUnavailableError
from workers.engine_api.discovery import EngineDiscovery
from workers.rollout.engine_client.engine_state import Candidate, EngineState

_MAX_AFFINITIES: Final = 16_384
"""Completions whose last engine is remembered: more than a worker has in flight."""
_WINDOW: Final = 64
"""Longest-waiting requests among which the router looks for one with a cached prefix."""
_MAX_SKIPS: Final = 64
"""How often a request may be overtaken by one with a cached prefix."""


class RouteRequest(Struct, frozen=True):
    """What a request needs of an engine."""

    min_policy_version: int
    """Oldest policy version that may sample it."""
    group: str = ""
    """Id of its group; empty: none."""
    completion: int = 0
    """Index within the group."""
    avoid: EngineState | None = None
    """Engine at which it failed; used again only if there is no other."""


@dataclass(eq=False, slots=True)
class _Waiting:
    request: RouteRequest
    assigned: anyio.Event = field(default_factory=anyio.Event)
    engine: EngineState | None = None
    times_skipped: int = 0


class Router:
    """The engines of a client by URL, and the requests that wait for one of them.

    Args:
        discovery: names the reason if there is no engine at all.

    Attributes:
        engines: every known engine by URL, healthy or not.
    """

    def __init__(self, discovery: EngineDiscovery) -> None:
        self._discovery = discovery
        self.engines: dict[str, EngineState] = {}
        self._waiting: deque[_Waiting] = deque()
        self._last_engine: OrderedDict[tuple[str, int], str] = OrderedDict()

    @property
    def healthy(self) -> list[EngineState]:
        """Engines that answer."""
        return [engine for engine in list(self.engines.values()) if engine.is_healthy]

    def has_waiting_for(self, engine: EngineState) -> bool:
        """Whether a request waits that this engine could serve if it had a free slot."""
        return any(engine.can_serve(waiting.request.min_policy_version) for waiting in self._waiting)

    def has_alternative(self, engine: EngineState, min_policy_version: int) -> bool:
        """Whether another engine could serve the request."""
        return any(other is not engine and other.can_serve(min_policy_version) for other in self.engines.values())

    async def acquire(self, request: RouteRequest, timeout_s: float) -> EngineState:
        """Wait for a slot at an engine; give it back with `release`.

        Args:
            request: what the engine must be able to do.
            timeout_s: how long to wait while no engine could serve it at all.

        Raises:
            EngineUnavailableError: no engine could serve it for that long.
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
        """Give a slot back."""
        engine.finish_request()
        self.dispatch()

    def record_affinity(self, request: RouteRequest, engine: EngineState) -> None:
        """Remember that this engine has the completion's tokens in its cache."""
        if request.group:
            key = request.group, request.completion
            self._last_engine[key] = engine.url
            self._last_engine.move_to_end(key)
            if len(self._last_engine) > _MAX_AFFINITIES:
                self._last_engine.popitem(last=False)

    def dispatch(self) -> None:
        """Assign free slots to waiting requests; call it whenever a slot became free or an engine became usable."""
        while self._waiting:
            free = {url for url, engine in self.engines.items() if not engine.is_full}
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
        """Return the request that gets a slot at one of the free engines; None if none can serve any request."""
        first: _Waiting | None = None
        eligible_urls: dict[int, tuple[str, ...]] = {}
        for position, waiting in enumerate(self._waiting):
            if first is not None and (position >= _WINDOW or first.times_skipped >= _MAX_SKIPS):
                break
            request = waiting.request
            version = request.min_policy_version
            if version not in eligible_urls:
                eligible_urls[version] = tuple(engine.url for engine in self._eligible(version))
            urls = eligible_urls[version]
            if free.isdisjoint(urls):
                continue
            first = first or waiting
            last = self._last_url(request)
            if not request.group or (last if last in urls else rank_engines(request.group, urls)[0]) in free:
                if waiting is not first:
                    first.times_skipped += 1
                return waiting
        return first

    def _choose(self, request: RouteRequest) -> EngineState | None:
        """Return the engine for a request; None if every eligible engine is full."""
        if len(self.engines) == 1:
            (only,) = self.engines.values()
            return only if only.can_serve(request.min_policy_version) and not only.is_full else None
        last = self._last_url(request)
        candidates = [engine.candidate for engine in self._eligible(request.min_policy_version)]
        if request.avoid is not None:
            others = [candidate for candidate in candidates if candidate.url != request.avoid.url]
            if others and (url := choose_engine(request.group, last, others)):
                return self.engines[url]
        url = choose_engine(request.group, last, candidates)
        return self.engines[url] if url else None

    def _last_url(self, request: RouteRequest) -> str:
        return self._last_engine.get((request.group, request.completion), "")

    def _eligible(self, min_policy_version: int) -> Iterator[EngineState]:
        return (engine for engine in self.engines.values() if engine.can_serve(min_policy_version))

    def _raise_if_none_eligible(self, min_policy_version: int, waited_s: float) -> None:
        """Raise if no engine could serve the request; otherwise the eligible ones are only full."""
        if any(self._eligible(min_policy_version)):
            return
        if not self.engines:
            raise EngineUnavailableError(self._discovery.empty_reason)
        if busy := [engine.url for engine in self.healthy if engine.refuses]:
            raise EngineUnavailableError(f"{', '.join(busy)} refused requests (429 or 503) for {waited_s:g} s")
        if self.healthy:
            outdated = "; ".join(str(engine.outdated_error(min_policy_version)) for engine in self.healthy)
            raise EngineUnavailableError(f"{outdated}, for {waited_s:g} s; is the trainer running?")
        problems = sorted({str(e.availability.problem) for e in self.engines.values() if e.availability.problem})
        why = f" ({'; '.join(problems)})" if problems else ""
        raise EngineUnavailableError(f"no engine answers at {', '.join(self.engines)}; tried for {waited_s:g} s{why}")


FIRST_TURN_FACTOR: Final = 1.1
"""Multiple of the mean load for a completion's first turn."""
LATER_TURN_FACTOR: Final = 1.25
"""The same for later turns."""
SLACK: Final = 4
"""Requests above that multiple: at a low load one more request slows an engine little, so groups stay together."""


@lru_cache(maxsize=4096)
def rank_engines(group: str, urls: tuple[str, ...]) -> tuple[str, ...]:
    """Order the engines by preference for a group. Removing one leaves the order of the others unchanged."""
    rank = {url: blake2b(f"{url}\n{group}".encode(), digest_size=8).digest() for url in urls}
    return tuple(sorted(urls, key=rank.__getitem__, reverse=True))


def max_load(factor: float, candidates: Sequence[Candidate]) -> int:
    """Return the load, including the next request, that one engine may have while others have less to do."""
    return math.ceil(factor * (sum(candidate.load for candidate in candidates) + 1) / len(candidates)) + SLACK


def choose_engine(group: str, last_url: str, candidates: Sequence[Candidate]) -> str | None:
    """Return the URL of the engine for a request; None if every candidate is at its limit.

    Args:
        group: id of the request's group; empty: the least loaded engine is chosen.
        last_url: the engine that sampled the completion's last turn; empty at the first turn.
        candidates: the engines that may serve the request.
    """
    free = [candidate for candidate in candidates if candidate.load < candidate.limit]
    if not free:
        return None
    if group:
        most = max_load(LATER_TURN_FACTOR, candidates)
        if any(candidate.url == last_url and candidate.load < most for candidate in free):
            return last_url
        most = max_load(FIRST_TURN_FACTOR, candidates)
        allowed = {candidate.url for candidate in free if candidate.load < most}
        for url in rank_engines(group, tuple(candidate.url for candidate in candidates)):
            if url in allowed:
                return url
    return min(free, key=lambda candidate: candidate.load).url
