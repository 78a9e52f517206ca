"""The page *Run*: the pipeline with depth, rate and age of each stage, and the charts of its steps.

The page *Runs*: running, finished and killed runs, from their folders alone.
"""

from typing import Any, Final
from urllib.parse import quote

import anyio.to_thread
import msgspec
from aiohttp import web
from msgspec import Struct
from yarl import URL

from stream.connection.run_connection import RunConnection
from workers.dashboard.dashboard import Dashboard
from workers.dashboard.live_view import StatusReading
from workers.dashboard.templating import render
from workers.runs.folder import file_state
from workers.runs.run import Run
from workers.runs.status import QueueReport, StageReport, queue_report

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


async def render_state(run: Run, snapshot: StatusReading, _: RunConnection | None) -> str:
    """Render the line that says how the run is doing, or how it ended."""
    return render("parts/state.html", await _values(run, snapshot))


async def render_pipeline(run: Run, snapshot: StatusReading, _: RunConnection | None) -> str:
    """Render the pipeline."""
    return render("parts/pipeline.html", await _values(run, snapshot))


async def render_steps(run: Run, _: StatusReading, __: RunConnection | None) -> str:
    """Return a text that changes with the run's metrics; the page then loads the charts again."""
    return await anyio.to_thread.run_sync(file_state, run.file("metrics.jsonl"))


async def _values(run: Run, snapshot: StatusReading) -> dict[str, Any]:
    report = queue_report(run.key, snapshot.status) if snapshot.status else None
    boxes = queue_boxes(report) if report else []
    ended = None
    if snapshot.is_offline:
        state = await anyio.to_thread.run_sync(run.state)
        ended = state if state.has_ended else None
    return {"run": run, "snapshot": snapshot, "report": report, "boxes": boxes, "ended": ended}


async def show_run(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
    """The page *Run*."""
    run = await dashboard.run(request)
    frame = await dashboard.view(run).read(("state", "pipeline"))
    charts = await anyio.to_thread.run_sync(dashboard.metrics(run).charts)
    overview = await anyio.to_thread.run_sync(run.state)
    return dashboard.page(
        "run.html", run, {"frame": frame, "charts": charts, "overview": overview, "more_parts": ",steps"}
    )


async def send_charts(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
    """The points of all charts, as JSON."""
    run = await dashboard.run(request)
    charts = await anyio.to_thread.run_sync(dashboard.metrics(run).charts)
    return web.Response(
        body=await anyio.to_thread.run_sync(msgspec.json.encode, charts), content_type="application/json"
    )


async def show_runs(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
    """The page *Runs*; a dashboard of one run goes to its page."""
    runs = await anyio.to_thread.run_sync(dashboard.runs.all)
    if len(runs) == 1 and "all" not in request.query:
        raise web.HTTPSeeOther(URL(f"/runs/{quote(runs[0].key, safe='')}", encoded=True))
    return dashboard.page("runs.html", None, {"states": await anyio.to_thread.run_sync(dashboard.runs.states)})
