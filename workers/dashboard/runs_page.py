"""The page *Runs*: running, finished and killed runs, from their folders alone."""

from urllib.parse import quote

import anyio.to_thread
from aiohttp import web
from yarl import URL

from workers.dashboard.dashboard import Dashboard
from workers.dashboard.run_source import RunOverview, read_overview


async def show_runs(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
    """The page *Runs*; a dashboard of one run goes to its page."""
    sources = await anyio.to_thread.run_sync(dashboard.catalog.sources)
    if len(sources) == 1 and "all" not in request.query:
        raise web.HTTPSeeOther(URL(f"/runs/{quote(sources[0].key, safe='')}", encoded=True))
    overviews = await anyio.to_thread.run_sync(lambda: [read_overview(source) for source in sources])
    return dashboard.page("runs.html", None, {"overviews": sorted(overviews, key=_order)})


def _order(run: RunOverview) -> tuple[bool, float]:
    return run.state != "running", -(run.changed_at or run.started_at or 0.0)
