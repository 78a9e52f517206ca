"""What a worker's leases are doing: noted by the code that does it, and reported to the server once a second.

To note an activity is to assign an attribute; nothing else happens where turns are sampled. The reporter reads the
attributes and finds out since when they have their values, so a time is at most a second late.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

import anyio
import structlog

from envs.call import replace_surrogates
from stream.errors import PenstockError
from stream.queue.in_flight import MAX_COMPLETIONS, MAX_NAME, Activity, CompletionInFlight, GroupInFlight
from stream.queue.lease import Lease
from stream.queue.stage import Stage

log = structlog.get_logger()

_INTERVAL_S: Final = 1.0
_RENEWALS: Final = 3
"""How often in a lease time an unchanged report is written again, so that it does not expire."""


class Named(Protocol):
    """A tool call, or a reward function."""

    @property
    def name(self) -> str:
        """Its name, for people."""


class EpisodeState(Protocol):
    """What the reporter reads of an episode."""

    @property
    def turn(self) -> int:
        """The model's turn, from 0."""

    def versions(self) -> set[int]:
        """Return the policy versions that sampled so far."""


class CompletionProgress:
    """What one completion is doing.

    Attributes:
        activity: what it does now; None before it begins.
        calls: the tools that run while `activity` is `tool`.
        engine: URL of the engine that samples, or that sampled last.
        episode: where its turn and its versions are read; None before it begins.
    """

    __slots__ = ("_seen", "_since", "activity", "calls", "engine", "episode")

    def __init__(self) -> None:
        self.activity: Activity | None = None
        self.calls: Sequence[Named] = ()
        self.engine = ""
        self.episode: EpisodeState | None = None
        self._seen: tuple[Activity | None, int] | None = None
        self._since = 0.0

    def describe(self, index: int, now: float) -> CompletionInFlight:
        """Return a record of the completion; `now` is the Unix time in seconds."""
        turn = self.episode.turn if self.episode is not None else 0
        if self._seen != (self.activity, turn):
            self._seen, self._since = (self.activity, turn), now
        return CompletionInFlight(
            index=index,
            turn=turn,
            activity=self.activity or "",
            detail=_names(self.calls) if self.activity == Activity.TOOL else "",
            since=self._since,
            engine=_clip(self.engine),
            versions=sorted(self.episode.versions()) if self.episode is not None else [],
        )


class GroupProgress:
    """What the group of one lease is doing.

    Attributes:
        activity: of the group as a whole; None while its completions run.
        pending: reward functions that run.
        environment: its environment's name.
        total: number of its completions.
        ended: number of those that have ended.
        completions: those that have not, by index.
    """

    def __init__(self, environment: str | None = None, total: int = 0) -> None:
        self.activity: Activity | None = None
        self.pending: Sequence[Named] = ()
        self.environment = environment
        self.total = total
        self.ended = 0
        self.completions: dict[int, CompletionProgress] = {}
        self._claimed_at = time.time()
        self._seen: Activity | None = None
        self._since = 0.0

    @contextmanager
    def completion(self, index: int) -> Iterator[CompletionProgress]:
        """Count a completion as in flight while the body of the `with` statement runs."""
        progress = self.completions[index] = CompletionProgress()
        try:
            yield progress
        finally:
            del self.completions[index]
            progress.episode = None  # it refers back; the garbage collector would find its tokens only much later
            self.ended += 1

    def describe(self, lease: Lease, now: float) -> GroupInFlight:
        """Return a record of the group: of many completions only those that changed longest ago."""
        if self._seen != self.activity:
            self._seen, self._since = self.activity, now
        completions = [progress.describe(index, now) for index, progress in self.completions.items()]
        completions.sort(key=lambda each: each.since)
        return GroupInFlight(
            entry=lease.id,
            prompt=_clip(lease.prompt_id),
            claimed_at=self._claimed_at,
            environment=_clip(self.environment or ""),
            activity=self.activity or "",
            detail=_names(self.pending) if self.activity == Activity.REWARD else "",
            since=self._since if self.activity else 0.0,
            total=self.total,
            ended=self.ended,
            completions=completions[:MAX_COMPLETIONS],
        )


class InFlightReporter:
    """Reports the groups of one stage's leases, at most once a second, and only while there are any.

    Args:
        stage: whose leases; they name the groups.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._groups: dict[str, GroupProgress] = {}
        self._has_groups = anyio.Event()
        self._failed = False

    @contextmanager
    def group(self, lease: Lease, environment: str | None, total: int = 0) -> Iterator[GroupProgress]:
        """Report a lease's group while the body of the `with` statement runs."""
        progress = self._groups[lease.id] = GroupProgress(environment, total)
        self._has_groups.set()
        try:
            yield progress
        finally:
            if self._groups.get(lease.id) is progress:  # else this worker has claimed the entry again
                del self._groups[lease.id]

    async def run(self) -> None:
        """Report until cancelled; run it in the worker's task group."""
        last: list[GroupInFlight] = []
        last_at = 0.0
        while True:
            if not self._groups and not last:
                self._has_groups = anyio.Event()
                await self._has_groups.wait()
            groups = self._describe(self._stage.leases)
            is_old = time.monotonic() - last_at > self._stage.retry_policy.lease_s / _RENEWALS
            if groups != last or (groups and is_old):
                last, last_at = groups, time.monotonic()
                await self._report(groups)
            await anyio.sleep(_INTERVAL_S)

    def _describe(self, leases: Mapping[str, Lease]) -> list[GroupInFlight]:
        now = time.time()
        return [progress.describe(leases[id_], now) for id_, progress in self._groups.items() if id_ in leases]

    async def _report(self, groups: list[GroupInFlight]) -> None:
        """Write a report. Nothing depends on it, so a server that does not take it is no error."""
        try:
            with anyio.move_on_after(self._stage.retry_policy.lease_s):
                await self._stage.report_in_flight(groups)
        except PenstockError as error:
            if not self._failed:
                log.warning("in_flight.report_failed", stage=self._stage.name, why=str(error))
            self._failed = True


def _names(named: Sequence[Named]) -> str:
    return _clip(", ".join(_clip(each.name) for each in named))


def _clip(name: str) -> str:
    """Return a name as a record may have it: short, and encodable."""
    return replace_surrogates(name[:MAX_NAME])
