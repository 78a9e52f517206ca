"""The page *Runs*: running, finished and killed runs, from their folders alone."""

from urllib.parse import quote

import anyio.to_thread
from aiohttp import web
from yarl import URL

from workers.dashboard.dashboard import Dashboard


async def show_runs(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
    """The page *Runs*; a dashboard of one run goes to its page."""
    runs = await anyio.to_thread.run_sync(dashboard.runs.all)
    if len(runs) == 1 and "all" not in request.query:
        raise web.HTTPSeeOther(URL(f"/runs/{quote(runs[0].key, safe='')}", encoded=True))
    return dashboard.page("runs.html", None, {"states": await anyio.to_thread.run_sync(dashboard.runs.states)})
