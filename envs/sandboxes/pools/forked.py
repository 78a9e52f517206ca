"""In a pool's child: run one piece of work in a fork, so that its effects end with it, and it can be killed alone.

The fork starts in milliseconds, with everything that its parent has imported. Whatever happens in it (a hang, a crash,
exhausted memory, changed modules) ends with it, and the child goes on with its next job.
"""

import os
import resource
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from envs.call import describe_error
from envs.sandboxes.resource_limits import set_limit

WALL_FACTOR = 12
"""Seconds of wall time for each second of processor time: a right answer must not fail because the machine is busy."""
_DEATHS = {signal.SIGXCPU: "it took too much processor time", signal.SIGKILL: "it was killed"}
_OK, _RAISED = b"+", b"-"


@dataclass(frozen=True)
class Forked:
    """How the work ended."""

    value: bytes | None
    """What the work returned; None if it did not return."""
    why: str = ""
    """Why it did not return; empty if it did."""
    used_its_time: bool = False
    """Whether the work took all of its processor time, or, in all of its wall time, at least half of it."""
    was_kept_waiting: bool = False
    """Whether the work got less than half of its processor time in all of its wall time. Then the machine is too busy,
    and nothing is known about the work."""


def run_forked(work: Callable[[], bytes], *, cpu_s: int, max_bytes: int) -> Forked:
    """Run work in a fork of this process, which has one thread.

    Args:
        work: returns bytes; computes and does not wait.
        cpu_s: limit of processor time, in seconds; wall time is limited to `WALL_FACTOR` times as much.
        max_bytes: limit of data memory.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _work_in_fork(work, writer, cpu_s, max_bytes)
    os.close(writer)
    try:
        data = _read_result(reader, time.monotonic() + WALL_FACTOR * cpu_s)
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)  # it may have closed the pipe and still be running
        _, status, usage = os.wait4(child, 0)
    if data is None and usage.ru_utime + usage.ru_stime >= cpu_s / 2:  # work that ends by itself needs far less
        return Forked(None, _DEATHS[signal.SIGXCPU], used_its_time=True)
    if data is None:
        seconds = WALL_FACTOR * cpu_s
        return Forked(None, f"it got less than {cpu_s / 2:g} s of the processor in {seconds} s", was_kept_waiting=True)
    if data[:1] == _OK:
        return Forked(data[1:])
    if data[:1] == _RAISED:
        return Forked(None, data[1:].decode(errors="replace"))
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    signals = {member.value: member for member in signal.Signals}
    why = _DEATHS.get(signals[number], f"it was ended by {signals[number].name}") if number in signals else "it exited"
    return Forked(None, why, used_its_time=number == signal.SIGXCPU)


def _work_in_fork(work: Callable[[], bytes], writer: int, cpu_s: int, max_bytes: int) -> None:
    """In the fork: run the work, write its result to the pipe, and end the process. Never returns."""
    try:
        os.dup2(writer, 3)
        os.closerange(4, 1024)  # among them the child's pipes to the worker
        set_limit(resource.RLIMIT_CPU, cpu_s, cpu_s + 1)
        set_limit(resource.RLIMIT_DATA, max_bytes, max_bytes)
        set_limit(resource.RLIMIT_NPROC, 0, 0)
        set_limit(resource.RLIMIT_FSIZE, 1 << 20, 1 << 20)
        try:
            result = _OK + work()
        except BaseException as error:  # noqa: BLE001  (a library's code on the model's text)
            result = _RAISED + describe_error(error).encode()
        remaining = memoryview(result)
        while remaining:
            remaining = remaining[os.write(3, remaining) :]
    finally:
        os._exit(0)


def _read_result(reader: int, deadline: float) -> bytes | None:
    """Read until the other end is closed; None if that takes longer than until `deadline`."""
    data = bytearray()
    poller = select.poll()
    poller.register(reader, select.POLLIN)
    while True:
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return None
        chunk = os.read(reader, 1 << 16)
        if not chunk:
            return bytes(data)
        data += chunk
        if len(data) > 1 << 24:
            return bytes(_RAISED + b"its result has more than 16 MB")
