"""The page *Timeline*: the way of groups from the feeder to the gradient, as bars on a common axis of time.

The page *Group* shows the bars of one group.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import anyio.to_thread
from aiohttp import web
from msgspec import Struct

from stream.errors import SettingsError
from workers.dashboard.dashboard import Dashboard
from workers.dashboard.groups_page import parse_filter
from workers.dashboard.templating import parse_number
from workers.runs.group_index import GroupIndex, GroupSummary
from workers.runs.metrics_file import MetricsFile
from workers.runs.phases import PHASES, Phase, StepTimes, main_phases

_MIN_WIDTH: Final = 0.15
"""Percent; a shorter bar would not be seen."""


class Bar(Struct, frozen=True, kw_only=True):
    """One phase on an axis; left end and width are in percent."""

    phase: Phase
    number: int
    """Position in `PHASES`; chooses the color."""
    left: float
    width: float


class Axis(Struct, frozen=True, kw_only=True):
    """An axis, as Unix times in seconds."""

    start: float
    end: float

    @classmethod
    def of_phases(cls, phases: Sequence[Phase]) -> "Axis":
        """Return the axis on which all these phases are; there is one or more."""
        return cls(start=phases[0].began_at, end=max(phase.ended_at for phase in phases))

    @property
    def ticks(self) -> list[tuple[float, float]]:
        """Round times after the start, in seconds, at most six of them, each with its position in percent."""
        length = max(self.end - self.start, 1e-9)
        rough = length / 6
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * times for times in (1, 2, 5, 10) if unit * times >= rough)
        return [(step * n, round(100 * step * n / length, 3)) for n in range(int(length / step) + 1)]

    def bars(self, phases: Sequence[Phase]) -> list[Bar]:
        """Return phases as bars; what lies before the axis is cut off."""
        bars = []
        for phase in phases:
            if phase.ended_at > self.start or phase.began_at >= self.start:
                left, right = self._at(max(phase.began_at, self.start)), self._at(phase.ended_at)
                width = max(_MIN_WIDTH, round(right - left, 3))
                bars.append(Bar(phase=phase, number=PHASES.index(phase.name), left=left, width=width))
        return bars

    def _at(self, time: float) -> float:
        """Return the position of a time in percent."""
        return round(100 * (time - self.start) / max(self.end - self.start, 1e-9), 3)


_ROWS: Final = 60
_SEARCH_S: Final = 0.5


class Lane(Struct, frozen=True, kw_only=True):
    """The way of one group."""

    group: GroupSummary
    bars: list[Bar]


def lanes(groups: list[GroupSummary], steps: Mapping[int, StepTimes]) -> tuple[Axis | None, list[Lane]]:
    """Return one lane for each group, and the axis that they share; None without a group whose times are known.

    The axis begins with the first claim. A prompt that waited longer than the axis reaches begins at its edge.
    """
    ways = [
        (group, main_phases(group.times, steps.get(group.step) if group.outcome == "trained" else None))
        for group in groups
    ]
    claims = [group.times.claimed_at for group in groups if group.times.claimed_at]
    if not claims:
        return None, []
    axis = Axis(start=min(claims), end=max([*claims, *(phase.ended_at for _, way in ways for phase in way)]))
    return axis, [Lane(group=group, bars=axis.bars(way)) for group, way in ways]


async def timeline_page(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
    """The page *Timeline*."""
    run = await dashboard.run(request)
    step, before = request.query.get("step", ""), request.query.get("before", "")
    index = await dashboard.groups(run)
    values: dict[str, Any] = {"step": step, "problem": "", "phases": PHASES, "here_before": before}
    try:
        values |= await anyio.to_thread.run_sync(_values, index, dashboard.metrics(run), step, parse_number(before))
    except SettingsError as error:
        values |= {"problem": str(error), "lanes": [], "axis": None, "before": None, "total": len(index)}
    return dashboard.page("timeline.html", run, values)


def _values(index: GroupIndex, metrics: MetricsFile, step: str, before: int | None) -> dict[str, Any]:
    """Return what the page shows. Blocks on files."""
    found = index.search(parse_filter({"step": step}), before, _ROWS, _SEARCH_S)
    axis, shown = lanes(found.groups, metrics.step_times())
    return {"axis": axis, "lanes": shown, "before": found.next_before, "total": len(index)}
