"""The page *Evaluations*: scores on held-out prompts by step, and the groups of one evaluation."""

from typing import Any

import anyio.to_thread
from aiohttp import web

from workers.dashboard.dashboard import Dashboard
from workers.dashboard.templating import parse_number
from workers.runs.evaluations import evaluated_steps, read_evaluations, read_groups
from workers.runs.groups import RunGroup, evaluated_group
from workers.runs.run import Run

_GROUPS = 500
"""Groups on the page."""


async def evaluations_page(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
    """The page *Evaluations*."""
    run = await dashboard.run(request)
    step = parse_number(request.query.get("step", ""))
    return dashboard.page("evaluations.html", run, await anyio.to_thread.run_sync(_values, run, step))


def _values(run: Run, step: int | None) -> dict[str, Any]:
    """Return what the page shows; of the last evaluation that has its groups if no step is chosen. Blocks on files."""
    steps = evaluated_steps(run.file())
    chosen = step if step is not None else steps[0] if steps else None
    groups: list[RunGroup] = []
    if chosen is not None:
        groups = [evaluated_group(group, chosen) for group in read_groups(run.file(), chosen)]
    results = read_evaluations(run.file())
    shown = [group.describe() for group in groups[:_GROUPS]]
    ks = sorted({k for result in results for k in result.overall.pass_at}, key=int)
    values = {"results": results[::-1], "steps": steps, "chosen": chosen, "ks": ks}
    return values | {"groups": shown, "total": len(groups)}
