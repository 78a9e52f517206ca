"""The pages *Runs*, *Runs compared*, *Run*, *Logs* and *Settings*.

*Runs* and *Runs compared* show running, finished and killed runs from their folders alone.
"""

from typing import Any, Final
from urllib.parse import quote

import anyio.to_thread
import msgspec
from aiohttp import web
from msgspec import Struct
from yarl import URL

from stream.connection.run_connection import RunConnection
from stream.errors import PenstockError
from workers.dashboard.dashboard import Dashboard
from workers.dashboard.live_view import StatusReading
from workers.dashboard.templating import render
from workers.runs.folder import file_state
from workers.runs.logs import RunLogs, log_names
from workers.runs.metrics_file import MAX_LINES, MetricCharts, overlay
from workers.runs.run import Run
from workers.runs.status import QueueReport, StageReport, queue_report
from workers.runs.warnings import read_incidents
from workers.settings.toml_file import dump_redacted

_INCIDENTS: Final = 12
"""Warnings and restarts on the page; the logs have all."""
_LOG_LINES: Final = 500
_WORKERS: Final = {"prompts": "rollout", "groups": "score", "scored": "train"}
"""The role that takes entries out of each queue."""


class QueueBox(Struct, frozen=True, kw_only=True):
    """One queue, and the role behind it."""

    name: str
    role: str
    stage: StageReport

    @property
    def claimed_by(self) -> list[tuple[str, int]]:
        """Workers of the role that hold entries, those with the most first."""
        return sorted(self.stage.consumers.items(), key=lambda item: (-item[1], item[0]))

    @property
    def ready(self) -> int:
        """Entries that a worker could claim now."""
        return max(0, self.stage.depth - self.stage.claimed - self.stage.delayed)


def queue_boxes(report: QueueReport) -> list[QueueBox]:
    """Return the queues in the order of the flow."""
    return [QueueBox(name=name, role=role, stage=report.stages[name]) for name, role in _WORKERS.items()]


async def render_state(run: Run, reading: StatusReading, _: RunConnection | None) -> str:
    """Render the line that says how the run is doing, or how it ended."""
    return render("parts/state.html", await _values(run, reading))


async def render_pipeline(run: Run, reading: StatusReading, _: RunConnection | None) -> str:
    """Render the pipeline."""
    return render("parts/pipeline.html", await _values(run, reading))


async def render_steps(run: Run, _: StatusReading, __: RunConnection | None) -> str:
    """Return a text that changes with the run's metrics; the page then loads the charts again."""
    return await anyio.to_thread.run_sync(file_state, run.file("metrics.jsonl"))


async def _values(run: Run, reading: StatusReading) -> dict[str, Any]:
    report = queue_report(run.key, reading.status) if reading.status else None
    boxes = queue_boxes(report) if report else []
    ended = None
    if reading.is_offline:
        state = await anyio.to_thread.run_sync(run.state)
        ended = state if state.has_ended else None
    return {"run": run, "reading": reading, "report": report, "boxes": boxes, "ended": ended}


async def run_page(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
    """The page *Run*."""
    run = await dashboard.run(request)
    frame = await dashboard.view(run).read(("state", "pipeline"))
    charts = await anyio.to_thread.run_sync(dashboard.metrics(run).charts)
    incidents = await anyio.to_thread.run_sync(read_incidents, run.file(), _INCIDENTS + 1)
    values = {"frame": frame, "charts": charts, "incidents": incidents[:_INCIDENTS], "more_parts": ",steps"}
    return dashboard.page("run.html", run, values | {"has_more": len(incidents) > _INCIDENTS})


async def charts_json(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
    """The points of all charts, as JSON."""
    run = await dashboard.run(request)
    charts = await anyio.to_thread.run_sync(dashboard.metrics(run).charts)
    return web.Response(
        body=await anyio.to_thread.run_sync(msgspec.json.encode, charts), content_type="application/json"
    )


async def logs_page(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
    """The page *Logs*: the last lines of all processes, or of one."""
    run = await dashboard.run(request)
    role = request.query.get("role", "")
    return dashboard.page("logs.html", run, await anyio.to_thread.run_sync(_logs, run, role))


def _logs(run: Run, role: str) -> dict[str, Any]:
    values = {"role": role, "names": log_names(run.file()), "lines": [], "problem": "", "count": _LOG_LINES}
    try:
        values["lines"] = RunLogs(run.file(), role).last_lines(_LOG_LINES)
    except PenstockError as error:
        values["problem"] = str(error)
    return values | {"is_live": run.state().state in ("running", "stopping")}


async def settings_page(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
    """The page *Settings*: `run.toml` as the run was last started, without secrets."""
    run = await dashboard.run(request)
    settings = await anyio.to_thread.run_sync(lambda: run.settings)
    return dashboard.page("settings.html", run, {"text": dump_redacted(settings) if settings else ""})


async def runs_page(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
    """The page *Runs*; a dashboard of one run goes to its page."""
    runs = await anyio.to_thread.run_sync(dashboard.runs.all)
    if len(runs) == 1 and "all" not in request.query:
        raise web.HTTPSeeOther(URL(f"/runs/{quote(runs[0].key, safe='')}", encoded=True))
    return dashboard.page("runs.html", None, {"states": await anyio.to_thread.run_sync(dashboard.runs.states)})


async def comparison_page(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
    """The page *Runs compared*: the charts of the runs that the address names, over each other."""
    names = _chosen(request)
    if len(names) < 2:
        raise web.HTTPBadRequest(text="Tick two or more runs.")
    values = {"names": names, "charts": await _overlay(dashboard, names), "most": MAX_LINES}
    return dashboard.page("comparison.html", None, values)


async def comparison_json(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
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
