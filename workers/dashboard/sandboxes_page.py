"""The page *Sandboxes*: which a run has, beside the completions that own them, and whether all are accounted for."""

from collections.abc import Sequence
from typing import Any, Final

from aiohttp import web
from msgspec import Struct

from stream.connection.run_connection import RunConnection
from stream.errors import PenstockError
from stream.operator.sandboxes import MAX_LOST_S, LiveSandbox, SandboxScan, scan_sandboxes
from workers.dashboard.dashboard import Dashboard
from workers.dashboard.live_view import StatusReading
from workers.dashboard.templating import render
from workers.runs.run import Run
from workers.runs.status import Activity, activities

SHOWN: Final = 200
"""Rows of the table, those first that no lease owns, then the oldest."""


class SandboxRow(Struct, frozen=True):
    """A sandbox, and what the completion that owns it is doing."""

    sandbox: LiveSandbox
    activity: Activity | None
    """None if its worker does not report it, or no completion owns it any more."""

    @property
    def is_late(self) -> bool:
        """It should have been removed by now."""
        return -self.sandbox.lease_s > MAX_LOST_S


def sandbox_rows(scan: SandboxScan, ongoing: Sequence[Activity]) -> list[SandboxRow]:
    """Return the sandboxes with what their completions are doing, those first that no lease owns."""
    doing = {(each.worker, each.prompt, each.completion): each for each in ongoing}
    rows = [SandboxRow(each, doing.get((each.owner, each.prompt, each.completion))) for each in scan.live]
    return sorted(rows, key=lambda row: row.sandbox.state == "owned")


async def render_sandboxes(run: Run, reading: StatusReading, connection: RunConnection | None) -> str:
    """Render the account and the table."""
    values: dict[str, Any] = {"run": run, "scan": None, "rows": [], "problem": reading.problem}
    if connection is not None:
        try:
            scan = await scan_sandboxes(connection)
        except PenstockError as error:
            values["problem"] = str(error)
        else:
            rows = sandbox_rows(scan, activities(reading.status) if reading.status else [])
            values |= {"scan": scan, "rows": rows[:SHOWN]}
    return render("parts/sandboxes.html", values)


async def sandboxes_page(dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
    """The page *Sandboxes*."""
    run = await dashboard.run(request)
    frame = await dashboard.view(run).read(("state", "sandboxes"))
    return dashboard.page("sandboxes.html", run, {"frame": frame})
