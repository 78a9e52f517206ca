"""The page *In flight*: what each completion is doing now, where, and for how long."""

from typing import Any, Final

from aiohttp import web
from markupsafe import Markup
from msgspec import Struct

from stream.connection.run_connection import RunConnection
from stream.operator.in_flight import groups_in_flight
from stream.operator.run_status import RunStatus
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

    prompt: str
    completion: int | None
    """None: the group as a whole."""
    turn: int | None
    """From 1."""
    activity: str
    detail: str
    seconds: float
    engine: str
    versions: str
    environment: str
    worker: str
    stage: str
    progress: str
    """Completions that have ended, of all of the group."""

    @property
    def is_long(self) -> bool:
        """Whether it may be stuck."""
        return self.seconds > LONG_S


def activity_rows(status: RunStatus) -> list[ActivityRow]:
    """Return what all leases are doing, the longest unchanged first."""
    now, rows = status.now_ms / 1000, []
    for group in groups_in_flight(status):
        shared = {
            "prompt": group.prompt,
            "environment": group.environment,
            "worker": group.worker,
            "stage": group.stage,
            "progress": f"{group.ended}/{group.total}" if group.total else "",
        }
        rows += [
            ActivityRow(
                completion=each.index,
                turn=each.turn + 1,
                activity=each.activity.replace("_", " "),
                detail=each.detail,
                seconds=max(0.0, now - (each.since or group.claimed_at)),
                engine=each.engine.removeprefix("http://"),
                versions="-".join(map(str, dict.fromkeys([*each.versions[:1], *each.versions[-1:]]))),
                **shared,
            )
            for each in group.completions
        ]
        if not group.completions:
            rows.append(
                ActivityRow(
                    completion=None,
                    turn=None,
                    activity=(group.activity or "starting").replace("_", " "),
                    detail=getattr(group, "detail", ""),
                    seconds=max(0.0, now - (group.since or group.claimed_at)),
                    engine="",
                    versions="",
                    **shared,
                )
            )
    return sorted(rows, key=lambda row: -row.seconds)


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
