"""The page *In flight*: what each completion is doing now, where, and for how long."""

from collections import Counter
from typing import Any, Final

from aiohttp import web
from markupsafe import Markup

from stream.connection.run_connection import RunConnection
from workers.dashboard.dashboard import Dashboard
from workers.dashboard.live_view import StatusReading
from workers.dashboard.rendering import render
from workers.runs.run import Run
from workers.runs.status import activities, count_stuck

SHOWN: Final = 200
"""Rows of the live table, the longest unchanged first; a link leads to all of them."""
LONG_S: Final = 60.0
"""Seconds after which an activity is marked."""


async def render_in_flight(run: Run, snapshot: StatusReading, _: RunConnection | None) -> str:
    """Render the table of the longest unchanged activities."""
    return render("parts/in_flight.html", _values(run, snapshot, SHOWN))


async def show_in_flight(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
    """The page *In flight*; with `all` every row, not renewed."""
    run = await dashboard.run(request)
    frame = await dashboard.view(run).read(("state", "in_flight"))
    everything = Markup()
    if "all" in request.query:
        everything = Markup(render("parts/in_flight.html", _values(run, frame.snapshot, None)))  # noqa: S704
    return dashboard.page("in_flight.html", run, {"frame": frame, "everything": everything})


def _values(run: Run, snapshot: StatusReading, count: int | None) -> dict[str, Any]:
    rows = activities(snapshot.status) if snapshot.status else []
    claimed = 0
    if snapshot.status:
        claimed = sum(stage.claimed for name, stage in snapshot.status.stages.items() if name != "scored")
    return {
        "run": run,
        "snapshot": snapshot,
        "rows": rows[:count],
        "total": len(rows),
        "long": count_stuck(rows, LONG_S),
        "long_s": LONG_S,
        "activities": Counter(row.name for row in rows).most_common(),
        "claimed": claimed,
    }
