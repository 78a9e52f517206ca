"""The child's side of a `ProcessPool`: one job after another, each in the main thread.

A request is one frame, a list of jobs; each job's answer is a frame of its own, written as soon as it is there, so that
the parent always knows which job is at work. A frame is four bytes of length, little-endian, and msgpack. What the jobs
print goes nowhere: the pipes to the parent are not their standard input and output.
"""

import importlib
import os
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from envs.processes.confine import set_limit
from stream.parent_death import die_with_parent

Handler = Callable[[bytes], bytes]

_HEADER = struct.Struct("<I")
HEADER_BYTES = _HEADER.size
"""Bytes before a frame's own."""


def encode_frame(data: bytes) -> bytes:
    """As it goes through a pipe, in either direction."""
    return _HEADER.pack(len(data)) + data


def frame_length(header: bytes) -> int:
    """How many bytes follow."""
    return int(_HEADER.unpack(header)[0])


class ChildConfig(msgspec.Struct, kw_only=True):
    """What a child is told on its command line, as JSON."""

    parent_pid: int
    """Its process id."""
    handler: str
    """`module:name` of what makes the handler."""
    args: dict[str, Any]
    """Keyword arguments for it."""
    recycle_bytes: int
    """A child that holds more after a job says so, and is replaced."""
    max_bytes: int
    """A job that asks for more gets a MemoryError."""


class ReadyMessage(msgspec.Struct):
    """The first frame: ready, or the reason why not."""

    error: str = ""


class JobResult(msgspec.Struct, array_like=True):
    """What became of one job."""

    result: bytes = b""
    error: str | None = None
    is_last: bool = False
    """This child takes no further job."""


def main() -> NoReturn:
    """Serve until the parent closes the pipe; `sys.argv[1]` is a `Spec`."""
    spec = msgspec.json.decode(sys.argv[1], type=ChildConfig)
    die_with_parent(spec.parent_pid)
    requests, answers = os.dup(0), os.dup(1)  # not inherited by what a job may start
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    set_limit(resource.RLIMIT_CORE, 0, 0)
    set_limit(resource.RLIMIT_DATA, spec.max_bytes, spec.max_bytes)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    try:
        handler = _load(spec)
    except BaseException:  # noqa: BLE001  (user code may run here; the parent tells what it was)
        _write(answers, ReadyMessage(error=traceback.format_exc(limit=-1)))
        os._exit(1)
    _write(answers, ReadyMessage())
    _serve(handler, requests, answers, spec.recycle_bytes)
    os._exit(0)  # whatever threads a job has left behind


def _load(spec: ChildConfig) -> Handler:
    module, _, name = spec.handler.partition(":")
    handler: Handler = getattr(importlib.import_module(module), name)(**spec.args)
    return handler


def _serve(handler: Handler, requests: int, answers: int, recycle_bytes: int) -> None:
    while (request := _read(requests)) is not None:
        for job in msgspec.msgpack.decode(request, type=list[bytes]):
            answer = _run_job(handler, job)
            answer.is_last = _resident_bytes() > recycle_bytes
            _write(answers, answer)
            if answer.is_last:
                return


def _run_job(handler: Handler, job: bytes) -> JobResult:
    try:
        return JobResult(handler(job))
    except BaseException as error:  # noqa: BLE001  (a verifier's timeout, or SystemExit, is no Exception)
        return JobResult(error=f"{type(error).__name__}: {error}")


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * resource.getpagesize()
    except OSError:  # not Linux
        return 0


def _read(pipe: int) -> bytes | None:
    """The next frame; None once the parent has closed the pipe."""
    head = _read_exactly(pipe, HEADER_BYTES)
    return None if head is None else _read_exactly(pipe, frame_length(head))


def _read_exactly(pipe: int, size: int) -> bytes | None:
    found = bytearray()
    while len(found) < size:
        more = os.read(pipe, size - len(found))
        if not more:
            return None
        found += more
    return bytes(found)


def _write(pipe: int, message: object) -> None:
    left = memoryview(encode_frame(msgspec.msgpack.encode(message)))
    while left:
        left = left[os.write(pipe, left) :]
