"""Watchdogs of a worker process: an event loop that is blocked, one that stands still, a process that is used up.

An `async def` that blocks (`time.sleep`, `requests.get`, a long computation) cannot be interrupted, and no lease is
renewed meanwhile. Leases expire and their entries go to other workers: nothing is lost, but the work is done twice.
The log names the code to fix.

A role whose event loop stands still is ended, even if code never releases Python's interpreter lock: a role under
`penstock run` shares memory with its supervisor: it notes there that its event loop turns, and which user code it
calls (`envs.call.call_memory`); the supervisor kills it. A role that was started alone is ended by a timer in C,
which needs no interpreter: it prints the stack of every thread (`Timeout (0:01:00)!`) and exits with 1.

A process that user code has used up, by too many hanging threads or too much memory, is replaced: a thread cannot be
stopped, and only a new process gets back what it holds. So the worker drains as after a stop request, logs the
reason, and exits with a code that means only this; the supervisor starts a new process.
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Final

import anyio
import psutil
import structlog

from envs.call import abandoned_threads
from envs.call.call_memory import CallMemory, record_calls
from workers.settings import QueueSettings

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
        still_s, seen, logged, look_s = 0.0, 0, 0, self._after_s / 4
        while True:
            began, cpu_s = time.monotonic(), time.process_time()
            if self._stopped.wait(look_s):
                return
            took_s = time.monotonic() - began
            late_s = took_s - look_s
            # If this thread did not run either, the whole process was suspended, with its container or machine.
            is_suspended = late_s > look_s and time.process_time() - cpu_s < late_s / 2
            still_s = 0.0 if is_suspended or seen != self._beats else still_s + took_s
            seen = self._beats
            if still_s >= self._after_s and seen != logged:
                logged = seen
                frame = sys._current_frames().get(self._loop_thread)  # noqa: SLF001  (the only way to see another thread)
                self._report(_blocking_frame(frame), self._after_s)


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


CALL_MEMORY: Final = "PENSTOCK_CALL_MEMORY"
"""Environment variable by which a supervisor names the memory that it made for a role."""
_LONGEST_TURN_S: Final = 1.0
_STDERR: Final = 2


class HangGuard:
    """Guards this process.

    Args:
        timeout_s: how long the event loop may stand still.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._turn_s = min(_LONGEST_TURN_S, timeout_s / 4)
        self._memory = _open_memory()
        record_calls(self._memory)

    async def watch(self) -> None:
        """Note that the event loop turns, until cancelled."""
        try:
            while True:
                if self._memory is not None:
                    self._memory.note_turn()
                else:
                    faulthandler.dump_traceback_later(self._timeout_s, file=_STDERR, exit=True)
                await anyio.sleep(self._turn_s)
        finally:
            if self._memory is None:
                faulthandler.cancel_dump_traceback_later()


def _open_memory() -> CallMemory | None:
    path = os.environ.pop(CALL_MEMORY, "")  # not for the processes that user code starts
    if not path:
        return None
    try:
        return CallMemory.open(path)
    except OSError as error:
        log.warning("call_memory.unavailable", why=str(error))
        return None


_MAX_ABANDONED_THREADS = 64
"""Hanging threads of one worker. Each holds what its call holds, and a stack of at most 8 MiB, so 64 are no danger to a
machine; a verifier that hangs now and then does not cost a restart every minute."""
_MIB = 1 << 20
_POLL_S = 1.0


class WorkerRecycler:
    """Watches this process's abandoned threads and memory.

    Args:
        queue: settings with the limits.
        stopping: set when a limit is reached.
    """

    def __init__(self, queue: QueueSettings, stopping: anyio.Event) -> None:
        self.reason = ""
        """The limit that was reached; empty while none is."""
        self._queue = queue
        self._stopping = stopping

    async def watch(self) -> None:
        """Watch until a limit is reached or the task is cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch_threads)
            if self._queue.max_memory_mb:
                tasks.start_soon(self._watch_memory)

    async def _watch_threads(self) -> None:
        await abandoned_threads.wait_for_count(_MAX_ABANDONED_THREADS)
        self._request_recycle(f"{_MAX_ABANDONED_THREADS} threads hang in environments or reward functions")

    async def _watch_memory(self) -> None:
        limit = self._queue.max_memory_mb
        while True:
            resident_mib = await anyio.to_thread.run_sync(resident_bytes) // _MIB
            if resident_mib >= limit:
                break
            await anyio.sleep(_POLL_S)  # nothing reports the growth of a process
        self._request_recycle(f"it uses {resident_mib} MiB of memory, the limit is {limit} (queue.max_memory_mb)")

    def _request_recycle(self, reason: str) -> None:
        if not self.reason and not self._stopping.is_set():
            self.reason = reason
            log.warning("worker.recycle_requested", why=reason)
            self._stopping.set()


def resident_bytes() -> int:
    """Return the memory of this process that is in RAM (RSS), in bytes."""
    return int(psutil.Process().memory_info().rss)
