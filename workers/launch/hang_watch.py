"""Ends a process whose event loop stands still, and finds out which code holds it up."""

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from typing import Final

import anyio
import psutil

from envs.call.call_memory import CallMemoryReader, RunningCall

_LOOK_S: Final = 1.0
_LONGEST_LOOK_S: Final = 2.0
"""Time between two looks that counts at most: the rest of a longer time this process, too, was suspended."""
_SAMPLE_S: Final = 0.5
_BUSY: Final = 0.3
"""Share of a core from which on a thread is what computes."""


async def wait_until_hanging(memory: CallMemoryReader, timeout_s: float) -> None:
    """Wait until the event loop of a process has not turned for this long; its start does not count."""
    turns, late_s, looked_at = 0, 0.0, time.monotonic()
    while late_s < timeout_s:
        await anyio.sleep(_LOOK_S)  # nothing reports that nothing happens
        now, seen = time.monotonic(), memory.turns
        late_s = 0.0 if seen != turns or seen == 0 else late_s + min(now - looked_at, _LONGEST_LOOK_S)
        turns, looked_at = seen, now


def end_hanging(memory: CallMemoryReader) -> RunningCall | None:
    """Send SIGABRT to the thread that holds a process up, which prints where it is; SIGKILL must follow.

    That thread computes, or else runs the newest call: nobody can begin another one while it holds the interpreter.

    Returns:
        The call of user code that it is in; None if it is in none.
    """
    pid, calls = memory.writer_pid, memory.running_calls()
    thread = _busiest_thread(pid)
    if thread is None:
        thread = calls[0].thread if calls else pid
    with suppress(OSError):  # it has ended meanwhile
        _send_abort(pid, thread)
    return next((call for call in calls if call.thread == thread), None)


def _busiest_thread(pid: int) -> int | None:
    """Return the thread that computes; None if none does, or that is unknown here."""
    before = _cpu_s(pid)
    time.sleep(_SAMPLE_S)
    used = {thread: cpu_s - before.get(thread, cpu_s) for thread, cpu_s in _cpu_s(pid).items()}
    thread = max(used, key=lambda each: used[each], default=None)
    return thread if thread is not None and used[thread] >= _BUSY * _SAMPLE_S else None


def _cpu_s(pid: int) -> dict[int, float]:
    """Return the CPU time of each thread of a process, in seconds."""
    try:
        return {each.id: each.user_time + each.system_time for each in psutil.Process(pid).threads()}
    except psutil.Error:
        return {}


def _send_abort(pid: int, thread: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).tgkill(pid, thread, signal.SIGABRT)
    else:
        os.kill(pid, signal.SIGABRT)
