"""The pages *Runs* and *Runs compared*: running, finished and killed runs, from their folders alone."""

from urllib.parse import quote

import anyio.to_thread
import msgspec
from aiohttp import web
from yarl import URL

from workers.dashboard.dashboard import Dashboard
from workers.runs.metrics_file import MAX_LINES, MetricCharts, overlay


async def show_runs(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
    """The page *Runs*; a dashboard of one run goes to its page."""
    runs = await anyio.to_thread.run_sync(dashboard.runs.all)
    if len(runs) == 1 and "all" not in request.query:
        raise web.HTTPSeeOther(URL(f"/runs/{quote(runs[0].key, safe='')}", encoded=True))
    return dashboard.page("runs.html", None, {"states": await anyio.to_thread.run_sync(dashboard.runs.states)})


async def show_comparison(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
    """The page *Runs compared*: the charts of the runs that the address names, over each other."""
    names = _chosen(request)
    if len(names) < 2:
        raise web.HTTPBadRequest(text="Tick two or more runs.")
    values = {"names": names, "charts": await _overlay(dashboard, names), "most": MAX_LINES}
    return dashboard.page("comparison.html", None, values)


async def send_comparison(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
    """The points of the charts, as JSON."""
    body = msgspec.json.encode(await _overlay(dashboard, _chosen(request)))
    return web.Response(body=body, content_type="application/json")


def _chosen(request: web.Request) -> list[str]:
    """Return the names of the runs of an address, as many as a chart has lines."""
    return list(dict.fromkeys(request.query.getall("run", [])))[:MAX_LINES]


async def _overlay(dashboard: Dashboard, names: list[str]) -> MetricCharts:
    runs = {}
    for name in names:
        if (run := await anyio.to_thread.run_sync(dashboard.runs.find, name)) is None:
            raise web.HTTPNotFound(text=f"This dashboard has no run {name!r}.")
        runs[name] = await anyio.to_thread.run_sync(dashboard.metrics(run).charts)
    return await anyio.to_thread.run_sync(overlay, runs)
