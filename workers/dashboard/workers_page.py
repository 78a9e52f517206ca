"""The pages *Workers and engines* and *In flight*: who holds what, what completions do, which engines answer."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import anyio.to_thread
from aiohttp import web
from markupsafe import Markup
from msgspec import Struct

from stream.connection.run_connection import RunConnection
from stream.errors import PenstockError
from stream.operator.status import RunStatus, groups_in_flight, ongoing_activities
from stream.trainer.trainer_lease import owner_name
from workers.dashboard.dashboard import Dashboard
from workers.dashboard.live_view import StatusReading
from workers.dashboard.templating import html_response, render
from workers.runs.live_run import read_live
from workers.runs.run import Run
from workers.runs.status import activities, count_stuck


class WorkerRow(Struct, frozen=True, kw_only=True):
    """One worker that holds entries of a stage."""

    stage: str
    worker: str
    held: int
    activities: list[tuple[str, int]]
    """What its completions are doing, the most frequent first."""
    longest_s: float | None
    """How long its longest activity goes on; None if it reports none."""
    engines: list[str]


class TrainerRow(Struct, frozen=True, kw_only=True):
    """The trainer's lease."""

    owner: str
    is_held: bool
    seconds_left: float
    version: int
    step: int


def worker_rows(status: RunStatus) -> list[WorkerRow]:
    """Return the workers that hold entries, by stage and name."""
    now = status.now_ms / 1000
    activities: dict[tuple[str, str], Counter[str]] = {}
    longest: dict[tuple[str, str], float] = {}
    engines: dict[tuple[str, str], set[str]] = {}
    for group in groups_in_flight(status):
        key = group.stage, group.worker
        counts = activities.setdefault(key, Counter())
        counts.update(each.text for each in ongoing_activities([group]))
        named = {each.engine.removeprefix("http://") for each in group.completions if each.engine}
        engines.setdefault(key, set()).update(named)
        longest[key] = max(longest.get(key, 0.0), now - group.unchanged_since)
    stages = status.stages | (status.evaluation.stages if status.evaluation else {})
    return [
        WorkerRow(
            stage=stage,
            worker=worker,
            held=held,
            activities=activities.get((stage, worker), Counter()).most_common(),
            longest_s=longest.get((stage, worker)),
            engines=sorted(engines.get((stage, worker), set())),
        )
        for stage, facts in stages.items()
        for worker, held in sorted(facts.consumers.items())
        if held
    ]


def trainer_row(status: RunStatus) -> TrainerRow | None:
    """Return the trainer's lease; None if the run has had no trainer."""
    policy = status.policy
    if "owner" not in policy:
        return None
    left = (int(policy.get("owner_until", 0)) - status.now_ms) / 1000
    step = int(policy.get("step", 0))
    return TrainerRow(
        owner=owner_name(policy["owner"]), is_held=left > 0, seconds_left=left, version=status.version, step=step
    )


def started_workers(run: Run) -> dict[str, int]:
    """Return how many workers `penstock run` keeps running, by role; empty: it did not start them. Blocks on files."""
    try:
        live, settings = read_live(run.file()), run.settings
    except PenstockError:
        return {}
    return {"rollout": settings.rollout.workers, "score": settings.score.workers} if live and settings else {}


def idle_workers(rows: Sequence[WorkerRow], started: Mapping[str, int]) -> dict[str, int]:
    """Return how many of the started workers hold nothing, by role."""
    busy = Counter(role for role in started for row in {row.worker for row in rows} if row.startswith(f"{role}-"))
    return {role: count - busy[role] for role, count in started.items() if count > busy[role]}


async def render_workers(run: Run, reading: StatusReading, _: RunConnection | None) -> str:
    """Render the tables of workers and of the trainer."""
    status = reading.status
    rows = worker_rows(status) if status else []
    trainer = trainer_row(status) if status else None
    known = await anyio.to_thread.run_sync(started_workers, run)
    values = {"rows": rows, "trainer": trainer, "known": known, "idle": idle_workers(rows, known)}
    return render("parts/workers.html", {"run": run, "reading": reading, **values})


async def workers_page(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
    """The page *Workers and engines*. Engines follow in a request of their own: a slow one does not delay the page."""
    run = await dashboard.run(request)
    frame = await dashboard.view(run).read(("state", "workers"))
    return dashboard.page("workers.html", run, {"frame": frame})


async def engines_fragment(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
    """The table of engines."""
    run = await dashboard.run(request)
    reports, problem = await dashboard.engines.read(run)
    values: dict[str, Any] = {"run": run, "engines": reports, "problem": problem}
    return html_response("parts/engines.html", values)


SHOWN: Final = 200
"""Rows of the live table, the longest unchanged first; a link leads to all of them."""
LONG_S: Final = 60.0
"""Seconds after which an activity is marked."""


async def render_in_flight(run: Run, reading: StatusReading, _: RunConnection | None) -> str:
    """Render the table of the longest unchanged activities."""
    return render("parts/in_flight.html", _values(run, reading, SHOWN))


async def in_flight_page(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
    """The page *In flight*; with `all` every row, not renewed."""
    run = await dashboard.run(request)
    frame = await dashboard.view(run).read(("state", "in_flight"))
    everything = Markup()
    if "all" in request.query:
        everything = Markup(render("parts/in_flight.html", _values(run, frame.reading, None)))  # noqa: S704
    return dashboard.page("in_flight.html", run, {"frame": frame, "everything": everything})


def _values(run: Run, reading: StatusReading, count: int | None) -> dict[str, Any]:
    rows = activities(reading.status) if reading.status else []
    claimed = 0
    if reading.status:
        claimed = sum(stage.claimed for name, stage in reading.status.stages.items() if name != "scored")
    return {
        "run": run,
        "reading": reading,
        "rows": rows[:count],
        "total": len(rows),
        "long": count_stuck(rows, LONG_S),
        "long_s": LONG_S,
        "activities": Counter(row.name for row in rows).most_common(),
        "claimed": claimed,
    }
