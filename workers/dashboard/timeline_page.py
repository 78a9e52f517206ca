"""The page *Timeline*: the way of groups from the feeder to the gradient, one row each on a common axis."""

from typing import Any, Final

import anyio.to_thread
from aiohttp import web
from msgspec import Struct

from stream.errors import SettingsError
from workers.dashboard.dashboard import Dashboard
from workers.dashboard.groups_page import parse_filter
from workers.dashboard.rendering import parse_number
from workers.runs.group_index import GroupIndex, GroupSummary
from workers.runs.metrics_file import MetricsFile

_ROWS: Final = 60
_SEARCH_S: Final = 0.5
PHASES: Final = (
    "waiting for a worker",
    "rollout",
    "waiting for rewards, and scoring",
    "waiting for the step, and training",
)


class Lane(Struct, frozen=True, kw_only=True):
    """The way of one group. Positions are in percent of the axis."""

    group: GroupSummary
    bars: list[tuple[int, float, float, float]]
    """Phase, left end, width, and seconds."""
    ended_at: float | None


class Axis(Struct, frozen=True, kw_only=True):
    """The common time axis, as Unix times in seconds."""

    start: float
    end: float

    def at(self, time: float) -> float:
        """Return the position of a time in percent."""
        return round(100 * (time - self.start) / max(self.end - self.start, 1e-9), 3)


def lanes(groups: list[GroupSummary], step_times: dict[int, float]) -> tuple[Axis, list[Lane]]:
    """Return one lane for each group, and the axis that they share. It begins with the first claim.

    A group's last phase ends when its step did. A prompt that waited longer than the axis reaches begins at its edge.
    """
    ways = [(group, (*group.times, _end(group, step_times))) for group in groups]
    claims = [times[1] for _, times in ways if times[1]]
    ends = [time for _, times in ways for time in times if time]
    if not claims:
        return Axis(start=0.0, end=0.0), []
    axis = Axis(start=min(claims), end=max(ends))
    found = []
    for group, times in ways:
        bars = []
        for phase in range(len(PHASES)):
            start, end = times[phase], times[phase + 1]
            if start and end and end >= start and end > axis.start:
                left = axis.at(max(start, axis.start))
                bars.append((phase, left, max(0.15, round(axis.at(end) - left, 3)), end - start))
        found.append(Lane(group=group, bars=bars, ended_at=times[4] or None))
    return axis, found


async def show_timeline(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
    """The page *Timeline*."""
    source = await dashboard.source(request)
    step, before = request.query.get("step", ""), request.query.get("before", "")
    index = await dashboard.groups(source)
    values: dict[str, Any] = {"step": step, "problem": "", "phases": PHASES, "here_before": before}
    try:
        values |= await anyio.to_thread.run_sync(_values, index, dashboard.metrics(source), step, parse_number(before))
    except SettingsError as error:
        values |= {"problem": str(error), "lanes": [], "axis": None, "before": None, "total": len(index)}
    return dashboard.page("timeline.html", source, values)


def _values(index: GroupIndex, metrics: MetricsFile, step: str, before: int | None) -> dict[str, Any]:
    """Return what the page shows. Blocks on files."""
    found = index.search(parse_filter({"step": step}), before, _ROWS, _SEARCH_S)
    axis, shown = lanes(found.groups, metrics.step_times())
    return {"axis": axis, "lanes": shown, "before": found.next_before, "total": len(index)}


def _end(group: GroupSummary, step_times: dict[int, float]) -> float:
    """Return when a group's step ended; 0 if it was not trained, or that is not known."""
    return step_times.get(group.step, 0.0) if group.outcome == "trained" else 0.0
