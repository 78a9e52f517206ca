"""What all pages share: the runs, their live views, the frame of a page, and the engines' answers.

Whatever is read or asked for a page is read or asked once for all viewers.
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
from workers.dashboard.templating import html_response, log_page_failure
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
    ("/sandboxes", "Sandboxes"),
    ("/dead", "Dead letters"),
    ("/logs", "Logs"),
    ("/settings", "Settings"),
)
"""Pages of a run: the end of the address, and the title."""

_READ_ALL_S: Final = 300.0
"""Deadline for reading all summaries of a run in the background; the next page about groups continues it."""
_READ_SLICE_S: Final = 0.2
_PAUSE_S: Final = 0.2
"""Pause between two slices of this reading, so that pages and the run itself get their share of the machine."""
_MAX_NOTES: Final = 64
_MAX_RENDERS: Final = 2
_ENGINES_S: Final = 5.0
"""Engines are asked at most this often, however many viewers there are."""
_QUERY_S: Final = 6.0
"""Deadline for the answers of all engines of a run."""


class Dashboard:
    """The runs of one dashboard, and what has been read of them for all viewers.

    Args:
        runs: the runs that the dashboard shows.
        access: who may do what.
        parts: functions that render the parts of pages that change while they are open.
        tasks: task group of the updates that open pages get; it must be open as long as the server.
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
        """Limits the processes that render snapshots: each runs an environment's code."""
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
        """Keep the result of a change for the next page. Returns the key that the address of that page must contain."""
        while len(self._notes) >= _MAX_NOTES:
            del self._notes[next(iter(self._notes))]
        key = secrets.token_urlsafe(8)
        self._notes[key] = text
        return key

    def take_note(self, key: str) -> str:
        """Return the result of a key, and forget it; empty if there is none, so an invented address shows no text."""
        return self._notes.pop(key, "")

    def view(self, run: Run) -> LiveView:
        """Return the live view of a run, which all its viewers share."""
        if run.key not in self._views:
            self._views[run.key] = LiveView(run, self._tasks, self.parts)
        return self._views[run.key]

    def metrics(self, run: Run) -> MetricsFile:
        """Return the metrics of a run."""
        if run.key not in self._metrics:
            self._metrics[run.key] = MetricsFile(run.file("metrics.jsonl"))
        return self._metrics[run.key]

    async def groups(self, run: Run) -> GroupIndex:
        """Return the index of a run's archived groups; a background task reads the summaries that it lacks."""
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

    def page(self, template: str, run: Run | None, values: Mapping[str, Any]) -> web.Response:
        """Return a page from its template; `run` is the run that the page is about, if any."""
        shared = {"run": run, "access": self.access, "navigation": NAVIGATION}
        return html_response(template, {**shared, **values})


def _fresh_index(known: GroupIndex | None, folder: Path) -> GroupIndex:
    """Return an index with all groups that have ended so far: the known one, or a new one if the ledger was cut."""
    return known if known is not None and known.refresh() else GroupIndex(folder)


class EngineQueries:
    """The latest answers of each run's engines, shared by all viewers."""

    def __init__(self) -> None:
        self._lock = anyio.Lock()
        self._known: dict[str, tuple[float, list[EngineReport], str]] = {}

    async def read(self, run: Run) -> tuple[list[EngineReport], str]:
        """Return reports of a run's engines, a few seconds old at most; without any, also why there are none."""
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
