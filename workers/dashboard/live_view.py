"""One run while a page is open at it: the status of its server is read and rendered once a second, for all viewers."""

import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import anyio
import anyio.to_thread
import structlog
from anyio.abc import TaskGroup
from markupsafe import Markup
from msgspec import Struct, structs

from stream.connection.run_connection import RunConnection
from stream.errors import PenstockError, ServerError
from stream.operator.status import RunStatus, read_status
from workers.dashboard.templating import describe_exception, log_page_failure, render
from workers.runs.folder import disk_problems
from workers.runs.live_run import read_live
from workers.runs.run import NoServerError, Run

log = structlog.get_logger()

_INTERVAL_S: Final = 1.0
_MAX_AGE_S: Final = 1.5
"""A page may show a frame of this age; an older one is replaced first."""
_READ_S: Final = 5.0
"""Deadline of one reading."""
_RETRY_S: Final = 2.0
"""Seconds until a run without a server is looked at again."""
_NO_ANSWER: Final = "server does not answer"


class StatusReading(Struct, frozen=True, kw_only=True):
    """What was read of a run at one moment."""

    status: RunStatus | None = None
    """None: the server did not answer."""
    problem: str = ""
    """Why there is no status."""
    label: str = ""
    """The problem in a word or two."""
    stopping: str = ""
    """How the run ends; empty: nobody asked it to, or it is not known here."""
    disk: list[str] = []
    """Disks that cannot be written, for which the run waits."""
    is_offline: bool = False
    """The run has no server at present."""


RenderPart = Callable[[Run, StatusReading, RunConnection | None], Awaitable[str]]
"""Returns the HTML of one part of a page."""


class Frame(Struct, frozen=True, kw_only=True):
    """One reading with its rendered parts."""

    number: int
    read_at: float
    """`time.monotonic()`."""
    reading: StatusReading
    parts: dict[str, str]

    def part(self, name: str) -> Markup:
        """Return a part for a page. It was rendered from a template, so it is not escaped again."""
        return Markup(self.parts[name])  # noqa: S704


class LiveView:
    """The newest frame of one run, renewed every second while it has viewers.

    Args:
        run: the run.
        tasks: runs the task that renews the frame.
        parts: functions that render the parts, by name.
    """

    def __init__(self, run: Run, tasks: TaskGroup, parts: Mapping[str, RenderPart]) -> None:
        self._run = run
        self._tasks = tasks
        self._render = parts
        self._frame: Frame | None = None
        self._changed = anyio.Event()
        self._read_lock = anyio.Lock()
        self._wanted: Counter[str] = Counter()
        """Viewers of each part."""
        self._is_renewing = False

    @property
    def viewers(self) -> int:
        """Number of open streams."""
        return self._wanted[""]

    async def read(self, parts: tuple[str, ...]) -> Frame:
        """Return a frame with these parts, read at most a moment ago; concurrent callers share one reading."""
        async with self._read_lock:
            frame = self._frame
            if frame is None or time.monotonic() - frame.read_at > _MAX_AGE_S or set(parts) - set(frame.parts):
                with self._wants(parts):
                    frame = await self._read_frame()
            return frame

    async def frames(self, parts: tuple[str, ...]) -> AsyncIterator[Frame]:
        """Yield the newest frame whenever there is one that the caller has not had. A slow caller skips frames."""
        seen = 0
        with self._wants(parts):
            if not self._is_renewing:
                self._is_renewing = True
                self._tasks.start_soon(self._renew)
            while True:
                frame, changed = self._frame, self._changed
                if frame is not None and frame.number > seen and not set(parts) - set(frame.parts):
                    seen = frame.number
                    yield frame
                else:
                    await changed.wait()

    @contextmanager
    def _wants(self, parts: tuple[str, ...]) -> Iterator[None]:
        self._wanted.update((*parts, ""))
        try:
            yield
        finally:
            self._wanted.subtract((*parts, ""))

    async def _renew(self) -> None:
        """Read frames, with one connection, until nobody looks any more."""
        try:
            while self.viewers:
                try:
                    async with self._run.connect(start_server=False) as connection:
                        while self.viewers:
                            async with self._read_lock:
                                frame = await self._read_with(connection)
                            if frame.reading.status is None:
                                break
                            await anyio.sleep(_INTERVAL_S)
                except Exception as error:  # noqa: BLE001  (one run that cannot be read must not end the dashboard)
                    async with self._read_lock:
                        await self._publish(self._without_status(error), None)
                if self.viewers:
                    await anyio.sleep(_RETRY_S)
        finally:
            self._is_renewing = False

    async def _read_frame(self) -> Frame:
        """Read one frame with a connection of its own."""
        try:
            async with self._run.connect(start_server=False) as connection:
                return await self._read_with(connection)
        except Exception as error:  # noqa: BLE001  (the rest of the page can be shown)
            return await self._publish(self._without_status(error), None)

    async def _read_with(self, connection: RunConnection) -> Frame:
        try:
            with anyio.fail_after(_READ_S):
                reading = StatusReading(status=await read_status(connection, with_in_flight=True))
        except TimeoutError:
            reading = StatusReading(problem=f"it did not answer within {_READ_S:g} s", label=_NO_ANSWER)
        except PenstockError as error:
            reading = self._without_status(error)
        return await self._publish(reading, connection)

    async def _publish(self, reading: StatusReading, connection: RunConnection | None) -> Frame:
        """Render the parts that open pages show, and hand the frame to all viewers."""
        parts = {}
        problems = await anyio.to_thread.run_sync(disk_problems, self._run.folder, reading.status)
        stopping = await anyio.to_thread.run_sync(_stopping, self._run)
        disk = [] if reading.is_offline else list(map(str, problems))
        reading = structs.replace(reading, disk=disk, stopping=stopping)
        for name in [name for name, count in self._wanted.items() if name and count > 0]:
            with anyio.move_on_after(_READ_S):
                parts[name] = await self._render_part(name, reading, connection)
        number = self._frame.number + 1 if self._frame else 1
        self._frame = Frame(number=number, read_at=time.monotonic(), reading=reading, parts=parts)
        self._changed.set()
        self._changed = anyio.Event()
        return self._frame

    async def _render_part(self, name: str, reading: StatusReading, connection: RunConnection | None) -> str:
        try:
            return await self._render[name](self._run, reading, connection)
        except Exception as error:  # noqa: BLE001  (the other parts can be shown)
            await log_page_failure(error, f"{self._run.key}, {name}")
            return render("parts/failed.html", {"error": describe_exception(error)})

    def _without_status(self, error: Exception) -> StatusReading:
        """Return the reading of a run whose status could not be read."""
        if isinstance(error, NoServerError):
            return StatusReading(problem=str(error), label="no server", is_offline=True)
        if isinstance(error, PenstockError):
            return StatusReading(
                problem=str(error), label=_NO_ANSWER if isinstance(error, ServerError) else "not begun"
            )
        problem = f"its status cannot be read: {describe_exception(error)}"
        if self._frame is None or self._frame.reading.problem != problem:
            log.error("run.unreadable", run=self._run.key, why=problem)
        return StatusReading(problem=problem, label="unreadable")


def _stopping(run: Run) -> str:
    """Return how a run ends that is asked to; empty otherwise. Blocks on files."""
    try:
        live = read_live(run.folder) if run.folder else None
    except PenstockError:  # `live.json` is another user's
        return ""
    return live.stopping if live else ""
