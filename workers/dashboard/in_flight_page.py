"""The page *In flight*: what each completion is doing now, where, and for how long."""

from typing import Any, Final

from aiohttp import web
from markupsafe import Markup
from msgspec import Struct

from stream.connection.run_connection import RunConnection
from stream.operator.in_flight import OngoingActivity, groups_in_flight, ongoing_activities
from stream.operator.run_status import RunStatus
from stream.queue.in_flight import ACTIVITY_TEXTS
from workers.dashboard.dashboard import Dashboard
from workers.dashboard.live_view import Snapshot
from workers.dashboard.rendering import render
from workers.dashboard.run_source import RunSource

SHOWN: Final = 200
"""Rows of the live table, the longest unchanged first; a link leads to all of them."""
LONG_S: Final = 60.0
"""Seconds after which an activity is marked."""


class ActivityRow(Struct, frozen=True, kw_only=True):
    """What one completion, or a group as a whole, is doing."""

    ongoing: OngoingActivity
    seconds: float

    @property
    def is_long(self) -> bool:
        """Whether it may be stuck."""
        return self.seconds > LONG_S

    @property
    def activity(self) -> str:
        """The activity without the names of tools or reward functions."""
        return ACTIVITY_TEXTS.get(self.ongoing.activity, self.ongoing.activity.replace("_", " "))

    @property
    def detail(self) -> str:
        """Names of the tools or reward functions that are running."""
        completion = self.ongoing.completion
        return self.ongoing.group.detail if completion is None else completion.detail

    @property
    def engine(self) -> str:
        """Host and port of the engine that samples, or that sampled last."""
        completion = self.ongoing.completion
        return completion.engine.removeprefix("http://") if completion else ""

    @property
    def versions(self) -> str:
        """Oldest and newest policy version that sampled so far."""
        versions = self.ongoing.completion.versions if self.ongoing.completion else []
        return "-".join(map(str, dict.fromkeys([*versions[:1], *versions[-1:]])))


def activity_rows(status: RunStatus) -> list[ActivityRow]:
    """Return what all leases are doing, the longest unchanged first."""
    now = status.now_ms / 1000
    ongoing = ongoing_activities(groups_in_flight(status))
    return [ActivityRow(ongoing=each, seconds=max(0.0, now - each.since)) for each in ongoing]


async def render_in_flight(source: RunSource, snapshot: Snapshot, _: RunConnection | None) -> str:
    """Render the table of the longest unchanged activities."""
    return render("parts/in_flight.html", _values(source, snapshot, SHOWN))


async def show_in_flight(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
    """The page *In flight*; with `all` every row, not renewed."""
    source = await dashboard.source(request)
    frame = await dashboard.view(source).read(("state", "in_flight"))
    everything = Markup()
    if "all" in request.query:
        everything = Markup(render("parts/in_flight.html", _values(source, frame.snapshot, None)))  # noqa: S704
    return dashboard.page("in_flight.html", source, {"frame": frame, "everything": everything})


def _values(source: RunSource, snapshot: Snapshot, count: int | None) -> dict[str, Any]:
    rows = activity_rows(snapshot.status) if snapshot.status else []
    activities: dict[str, int] = {}
    for row in rows:
        activities[row.activity] = activities.get(row.activity, 0) + 1
    claimed = 0
    if snapshot.status:
        claimed = sum(stage.claimed for name, stage in snapshot.status.stages.items() if name != "scored")
    return {
        "source": source,
        "snapshot": snapshot,
        "rows": rows[:count],
        "total": len(rows),
        "long": sum(row.is_long for row in rows),
        "long_s": LONG_S,
        "activities": sorted(activities.items(), key=lambda item: -item[1]),
        "claimed": claimed,
    }
