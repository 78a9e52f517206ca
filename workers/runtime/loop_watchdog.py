"""Finds which code blocks the event loop.

An `async def` that blocks (`time.sleep`, `requests.get`, a long computation) cannot be interrupted, and no lease is
renewed meanwhile. Leases expire and their entries go to other workers: nothing is lost, but the work is done twice. The
log names the code to fix.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import anyio
import structlog

log = structlog.get_logger()

_OWN_FOLDERS = tuple(str(Path(__file__).parents[2] / package) + "/" for package in ("stream", "envs", "workers"))


def log_block(by: str, so_far_s: float) -> None:
    """Log what blocks the event loop."""
    log.warning("event_loop.blocked", by=by, so_far_s=so_far_s)


class LoopWatchdog:
    """Watches one event loop from a separate thread.

    Args:
        after_s: shortest block in seconds that is reported. It is reported once, at the latest after twice this time.
        report: called on that thread with the code, as `FILE:LINE NAME`, and `after_s`.
    """

    def __init__(self, after_s: float, report: Callable[[str, float], None] = log_block) -> None:
        self._after_s = after_s
        self._report = report
        self._beats = 0
        self._stopped = threading.Event()
        self._loop_thread = 0

    async def watch(self) -> None:
        """Watch the current event loop until cancelled."""
        self._loop_thread = threading.get_ident()
        threading.Thread(target=self._check, daemon=True, name="penstock loop watchdog").start()
        try:
            while True:
                self._beats += 1
                await anyio.sleep(self._after_s / 2)
        finally:
            self._stopped.set()

    def _check(self) -> None:
        seen = logged = 0
        while True:
            began, cpu_s = time.monotonic(), time.process_time()
            if self._stopped.wait(self._after_s):
                return
            late_s = time.monotonic() - began - self._after_s
            if late_s > self._after_s and time.process_time() - cpu_s < late_s / 2:
                seen = 0  # the whole process was suspended, with its container or machine; wait once more
                continue
            if seen == self._beats != logged:
                logged = seen
                frame = sys._current_frames().get(self._loop_thread)  # noqa: SLF001  (the only way to see another thread)
                self._report(_blocking_frame(frame), self._after_s)
            seen = self._beats


def _blocking_frame(frame: FrameType | None) -> str:
    """Return the outermost user frame, as file:line and name: the frame after the last one of Penstock's own code."""
    outer = inner = None
    for each in _outermost_first(frame):
        if inner is None or inner.f_code.co_filename.startswith(_OWN_FOLDERS):
            outer = each
        inner = each
    if outer is None:
        return "unknown"
    return f"{outer.f_code.co_filename}:{outer.f_lineno} {outer.f_code.co_qualname}"


def _outermost_first(frame: FrameType | None) -> Iterator[FrameType]:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return reversed(frames)
