"""Says who holds the event loop, when nothing else gets its turn: no lease is renewed meanwhile.

An `async def` that blocks (`time.sleep`, `requests.get`, a long computation) cannot be cut short from outside. What it
costs is bounded elsewhere: leases run out, and their entries go to other workers. Who wrote it has to be told.
"""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import anyio
import structlog

log = structlog.get_logger()

_OWN_FOLDERS = tuple(str(Path(__file__).parents[2] / package) + "/" for package in ("stream", "envs", "workers"))


class LoopWatchdog:
    """Watches one event loop from a thread of its own.

    Args:
        after_s: it is told when the loop has been held for so long, and at the latest at twice that; once each time.
    """

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._beats = 0
        self._stopped = threading.Event()
        self._loop_thread = 0

    async def watch(self) -> None:
        """Watch the loop that this runs on until cancelled."""
        self._loop_thread = threading.get_ident()
        threading.Thread(target=self._check, daemon=True, name="penstock held loop").start()
        try:
            while True:
                self._beats += 1
                await anyio.sleep(self._after_s / 2)
        finally:
            self._stopped.set()

    def _check(self) -> None:
        seen = told = 0
        while not self._stopped.wait(self._after_s):
            if seen == self._beats != told:
                told = seen
                frame = sys._current_frames().get(self._loop_thread)  # noqa: SLF001  (the only way to see another thread)
                log.warning("event_loop.blocked", by=_blocking_frame(frame), so_far_s=self._after_s)
            seen = self._beats


def _blocking_frame(frame: FrameType | None) -> str:
    """Of the frames, the outermost that our code has called last, as file:line and name; that is where users' begin."""
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
