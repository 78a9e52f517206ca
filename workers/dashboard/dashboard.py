"""What all pages share: the runs, their live views, and the frame of a page.

Ask the engines of a run whether they answer, and with which weights; once for all viewers.
"""

import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread
from aiohttp import web
from anyio.abc import TaskGroup

from stream.errors import PenstockError
from workers.dashboard.access import Access
from workers.dashboard.live_view import LiveView, RenderPart
from workers.dashboard.templating import log_page_failure, render
from workers.runs.catalog import Runs
from workers.runs.engines import EngineReport, read_engine_reports
from workers.runs.group_index import GroupIndex
from workers.runs.metrics_file import MetricsFile
from workers.runs.run import Run

NAVIGATION: Final = (
    ("", "Run"),
    ("/in-flight", "In flight"),
    ("/groups", "Groups"),
    ("/evaluations", "Evaluations"),
    ("/timeline", "Timeline"),
    ("/workers", "Workers and engines"),
    ("/dead", "Dead letters"),
    ("/logs", "Logs"),
    ("/settings", "Settings"),
)
"""Pages of a run: the end of the address, and the title."""

_READ_ALL_S: Final = 300.0
"""Deadline of reading all summaries of a run; the next page about groups goes on."""
_READ_SLICE_S: Final = 0.2
_MAX_NOTES: Final = 64
_MAX_RENDERS: Final = 2
_PAUSE_S: Final = 0.2
"""Between two slices, so that pages and the run itself get their share of the machine."""


class Dashboard:
    """The runs of one dashboard, and what is read of them once for all viewers.

    Args:
        runs: the runs.
        access: who may do what.
        parts: functions that render the parts of pages that change while they are open.
        tasks: runs what renews the pages while a page is open; it must stay open as long as the server.
    """

    def __init__(self, runs: Runs, access: Access, parts: Mapping[str, RenderPart], tasks: TaskGroup) -> None:
        self.runs = runs
        self.access = access
        self.parts = parts
        self._tasks = tasks
        self._views: dict[str, LiveView] = {}
        self._metrics: dict[str, MetricsFile] = {}
        self._groups: dict[str, GroupIndex] = {}
        self._notes: dict[str, str] = {}
        """Results of changes, each for the page that follows it; the keys cannot be guessed."""
        self.engines = EngineQueries()
        self.renders = anyio.CapacityLimiter(_MAX_RENDERS)
        """Processes with environments' code, which render snapshots."""
        self._reading: set[GroupIndex] = set()
        """Indexes whose summaries are being read in the background."""

    async def run(self, request: web.Request) -> Run:
        """Return the run of an address.

        Raises:
            HTTPNotFound: this dashboard has no such run.
        """
        run = await anyio.to_thread.run_sync(self.runs.find, request.match_info["run"])
        if run is None:
            raise web.HTTPNotFound(text="This dashboard has no run of that name.")
        return run

    def keep_note(self, text: str) -> str:
        """Keep the result of a change for the next page. Returns what the page's address has to name."""
        while len(self._notes) >= _MAX_NOTES:
            del self._notes[next(iter(self._notes))]
        key = secrets.token_urlsafe(8)
        self._notes[key] = text
        return key

    def take_note(self, key: str) -> str:
        """Return a result once; empty if there is none: an address alone puts no text on a page."""
        return self._notes.pop(key, "")

    def view(self, run: Run) -> LiveView:
        """Return what all viewers of a run share."""
        if run.key not in self._views:
            self._views[run.key] = LiveView(run, self._tasks, self.parts)
        return self._views[run.key]

    def metrics(self, run: Run) -> MetricsFile:
        """Return the metrics of a run."""
        if run.key not in self._metrics:
            self._metrics[run.key] = MetricsFile(run.file("metrics.jsonl"))
        return self._metrics[run.key]

    async def groups(self, run: Run) -> GroupIndex:
        """Return the index of a run's archived groups; its summaries are read on in the background."""
        known = self._groups.get(run.key)
        index = await anyio.to_thread.run_sync(_fresh_index, known, run.file())
        if self._groups.get(run.key) is known:
            self._groups[run.key] = index
        index = self._groups[run.key]
        if index.unread and index not in self._reading:
            self._reading.add(index)
            self._tasks.start_soon(self._read_summaries, run.key, index)
        return index

    async def _read_summaries(self, key: str, index: GroupIndex) -> None:
        try:
            with anyio.move_on_after(_READ_ALL_S):
                is_done = False
                while not is_done:
                    await anyio.sleep(_PAUSE_S)
                    is_done = await anyio.to_thread.run_sync(index.read_more, _READ_SLICE_S)
        except Exception as error:  # noqa: BLE001  (pages about groups go on with what was read)
            await log_page_failure(error, f"{key}, groups")
        finally:
            self._reading.discard(index)

    def page(self, template: str, run: Run | None, values: Mapping[str, Any], status: int = 200) -> web.Response:
        """Return a page; `run`: the run that it is about, if any."""
        shared = {"run": run, "access": self.access, "navigation": NAVIGATION}
        text = render(template, {**shared, **values})
        return web.Response(status=status, text=text, content_type="text/html", charset="utf-8")


def _fresh_index(known: GroupIndex | None, folder: Path) -> GroupIndex:
    """Return the index of a run with all groups that have ended: the known one, unless its ledger was cut."""
    return known if known is not None and known.refresh() else GroupIndex(folder)


_ENGINES_S: Final = 5.0
"""Engines are asked at most this often, however many viewers there are."""
_QUERY_S: Final = 6.0
"""Deadline of asking all engines."""


class EngineQueries:
    """The last answers of the engines of each run, shared by all viewers."""

    def __init__(self) -> None:
        self._lock = anyio.Lock()
        self._known: dict[str, tuple[float, list[EngineReport], str]] = {}

    async def read(self, run: Run) -> tuple[list[EngineReport], str]:
        """Return the engines, asked a moment ago, and why they could not be asked."""
        async with self._lock:
            read_at, reports, problem = self._known.get(run.key, (float("-inf"), [], ""))
            if time.monotonic() - read_at > _ENGINES_S:
                reports, problem = await _ask_engines(run)
                self._known[run.key] = time.monotonic(), reports, problem
            return reports, problem


async def _ask_engines(run: Run) -> tuple[list[EngineReport], str]:
    try:
        with anyio.fail_after(_QUERY_S):
            settings = await anyio.to_thread.run_sync(lambda: run.settings)
            return await read_engine_reports(settings, run.folder), ""
    except TimeoutError:
        return [], f"they did not answer within {_QUERY_S:g} s"
    except PenstockError as error:
        return [], str(error)
