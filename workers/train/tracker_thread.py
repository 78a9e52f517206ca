"""Feeds trackers in threads of their own, so that none can slow down, block or end the trainer.

::

    trainer ─► MetricsLog (metrics.jsonl) ─► Trackers.log ─► queue, at most 1000 steps ─► thread ─► tracker
                                                                                            └► trackers/NAME.json

A thread notes the last step that its tracker took. The next start of the run first logs steps of `metrics.jsonl` that
came after it: those that were lost with their trainer, or all, for a tracker that is new.
"""

import importlib
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from queue import Empty, Full, Queue
from threading import Thread
from typing import Any, Final

import anyio.to_thread
import msgspec
import structlog
from msgspec import Struct

from stream.connection.run_identity import read_identity
from stream.durable import write_file_atomically
from stream.waiting import Backoff
from workers.runs.metrics_file import read_metrics
from workers.settings import Settings
from workers.train.trackers import TRACKERS, TrackedRun, Tracker

log = structlog.get_logger()

_MAX_QUEUED: Final = 1000
_ATTEMPTS: Final = 4
"""Tries to log one step."""
_BACKOFF: Final = Backoff(1.0, 10.0)
_CLOSE_TIMEOUT_S: Final = 10.0
"""How long the end of a trainer waits for trackers to deliver what is queued; what is not delivered then is logged by
the next start."""

Metrics = dict[str, Any]


class _Delivered(Struct):
    """Content of `trackers/NAME.json`."""

    step: int


class TrackerThread:
    """One tracker with its queue and its thread.

    Args:
        name: of the tracker.
        run: the run.
        make: makes the tracker.
    """

    def __init__(self, name: str, run: TrackedRun, make: Callable[[TrackedRun], Tracker]) -> None:
        self.name = name
        self._run, self._make = run, make
        self._queue: Queue[Metrics | None] = Queue(_MAX_QUEUED)
        self._file = run.folder / "trackers" / f"{name}.json"
        self._delivered = _read_delivered(self._file)
        self._closing_at = math.inf
        self._dropped = 0
        self._thread = Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, metrics: Metrics) -> None:
        """Queue the metrics of a step; if the queue is full, they are left out until the next start of the run."""
        try:
            self._queue.put_nowait(metrics)
        except Full:
            self._dropped += 1
            if self._dropped == 1:
                log.warning(
                    "tracker.queue_full", tracker=self.name, steps=_MAX_QUEUED, effect="later steps are missing"
                )

    def begin_close(self, deadline: float) -> None:
        """Ask the thread to end once its queue is empty, at the latest at this time of the monotonic clock."""
        self._closing_at = deadline
        with suppress(Full):  # then the thread ends when the queue is empty
            self._queue.put_nowait(None)

    def join(self) -> None:
        """Wait for the thread until the deadline."""
        self._thread.join(max(0.0, self._closing_at - time.monotonic()))
        if self._thread.is_alive():
            log.warning("tracker.not_finished", tracker=self.name, queued=self._queue.qsize())

    def _work(self) -> None:
        try:
            tracker = self._make(self._run)
        except BaseException as error:  # noqa: BLE001  (a tracker's library may raise anything, even SystemExit)
            log.warning("tracker.failed", tracker=self.name, why=_describe(error), effect="this start is not tracked")
            return
        log.info("tracker.started", tracker=self.name, steps_before=self._delivered)
        for metrics in self._steps():
            if not self._deliver(tracker, metrics):
                break
        try:
            tracker.close()
        except BaseException as error:  # noqa: BLE001
            log.warning("tracker.failed", tracker=self.name, why=_describe(error))

    def _steps(self) -> Iterator[Metrics]:
        """Yield the steps of earlier starts that the tracker lacks, then those of the queue until it is closed."""
        for metrics in read_metrics(self._run.folder / "metrics.jsonl"):
            if self._delivered < metrics["step"] < self._run.first_step:
                yield metrics
        while True:
            try:
                step = self._queue.get(timeout=1.0 if self._closing_at < math.inf else None)
            except Empty:
                step = None
            if step is None:
                return
            yield step

    def _deliver(self, tracker: Tracker, metrics: Metrics) -> bool:
        """Log one step, with retries. Returns False if the thread has to end."""
        step = int(metrics["step"])
        numbers = {
            name: float(value)
            for name, value in metrics.items()
            if isinstance(value, int | float) and math.isfinite(value) and name != "time"
        }
        for attempt in range(1, _ATTEMPTS + 1):
            if time.monotonic() > self._closing_at:
                return False
            try:
                tracker.log(step, numbers, float(metrics.get("time", time.time())))
            except BaseException as error:  # noqa: BLE001
                log.warning("tracker.failed", tracker=self.name, step=step, why=_describe(error), attempt=attempt)
            else:
                self._note(step)
                return True
            if attempt < _ATTEMPTS:
                time.sleep(min(_BACKOFF.delay_s(attempt), max(0.0, self._closing_at - time.monotonic())))
        return True

    def _note(self, step: int) -> None:
        """Write down the last step that the tracker took."""
        self._delivered = step
        try:
            self._file.parent.mkdir(exist_ok=True)
            write_file_atomically(self._file, msgspec.json.encode(_Delivered(step)))
        except OSError as error:
            log.warning("tracker.state_not_written", tracker=self.name, why=str(error))


class Trackers:
    """The trackers of a run; without any, nothing happens."""

    def __init__(self, threads: Sequence[TrackerThread] = ()) -> None:
        self._threads = threads

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Queue the metrics of a step, as they are in `metrics.jsonl`, or more of the same step; never waits."""
        for thread in self._threads if metrics else ():
            thread.log(dict(metrics))

    def close(self) -> None:
        """Deliver what is queued, within seconds."""
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.begin_close(deadline)
        for thread in self._threads:
            thread.join()


def import_early(settings: Settings) -> None:
    """Import the trackers' libraries, which takes seconds, in threads: a first step does not compete with it."""
    for name in settings.train.trackers:
        Thread(target=_import, args=(name,), name=f"import {name}", daemon=True).start()


def _import(library: str) -> None:
    with suppress(BaseException):  # the tracker's own thread reports it
        importlib.import_module(library)


@asynccontextmanager
async def open_trackers(settings: Settings, first_step: int) -> AsyncIterator[Trackers]:
    """Open the trackers of `train.trackers`; they are closed at the end of the block.

    Args:
        settings: of the run.
        first_step: the first step that this start of the trainer will log.
    """
    trackers = Trackers()
    if settings.train.trackers:
        run = await anyio.to_thread.run_sync(tracked_run, settings, first_step)
        trackers = Trackers([TrackerThread(name, run, TRACKERS[name]) for name in settings.train.trackers])
    try:
        yield trackers
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(trackers.close)


def tracked_run(settings: Settings, first_step: int) -> TrackedRun:
    """Return what trackers are given about a run."""
    identity = read_identity(settings.folder)
    return TrackedRun(
        id=(identity.id if identity else "") or settings.run.name,
        name=settings.run.name,
        folder=settings.folder.absolute(),
        settings=_without_private(msgspec.to_builtins(settings)),
        first_step=first_step,
    )


_PRIVATE: Final = frozenset({"args", "redis", "urls", "fields"})
"""Keys that may hold passwords, tokens of services, or whatever user code is given."""


def _without_private(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_private(inner) for key, inner in value.items() if key not in _PRIVATE}
    if isinstance(value, list | tuple):
        return [_without_private(each) for each in value]
    return value


def _read_delivered(file: Path) -> int:
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Delivered).step
    except (OSError, ValueError):
        return 0


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]
