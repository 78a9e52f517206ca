"""The child's side of a `ProcessPool`: runs one job after another in the main thread.

A request is one frame with a list of jobs. Each result is a separate frame, written as soon as the job ends, so the
parent knows which job is running. A job may report an interim result, which counts if its process is then killed. A
frame is a length (4 bytes, little-endian) and msgpack. Jobs print to /dev/null: the pipes to the parent are not their
standard streams.

`Job` is the parent's record of one job, `JobBatch` that of the jobs of one call.
"""

import importlib
import os
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import anyio
import msgspec

from envs.call import Outcome
from envs.sandboxes.resource_limits import set_limit
from stream.errors import PenstockError
from stream.parent_death import die_with_parent

Handler = Callable[[bytes], bytes]

_HEADER = struct.Struct("<I")
HEADER_BYTES = _HEADER.size
"""Length of a frame's header."""


def encode_frame(data: bytes) -> bytes:
    """Prefix data with its length."""
    return _HEADER.pack(len(data)) + data


def frame_length(header: bytes) -> int:
    """Return the length that a frame's header states."""
    return int(_HEADER.unpack(header)[0])


class ChildConfig(msgspec.Struct, kw_only=True):
    """Configuration of a child, JSON on its command line."""

    parent_pid: int
    """0: something else ends the child with its parent."""
    handler: str
    """`module:name` of the callable that makes the handler."""
    args: dict[str, Any]
    """Keyword arguments of that callable."""
    recycle_bytes: int
    """Resident memory above which the child ends after its job."""
    max_bytes: int
    """Data memory above which a job gets a MemoryError."""


class ReadyMessage(msgspec.Struct):
    """The first frame: ready if `error` is empty."""

    error: str = ""


class JobResult(msgspec.Struct, array_like=True):
    """Result of one job: a value, or the error that the job raised."""

    value: bytes = b""
    error: str | None = None
    is_last: bool = False
    """The child runs no further job."""
    is_interim: bool = False
    """The job goes on; `value` is its result if the process ends before the job does."""


_results: int | None = None
"""In a child: the pipe of results."""


def report_interim(value: bytes) -> None:
    """In a job: report what the job's outcome contains if this process ends before the job. Elsewhere: do nothing."""
    if _results is not None:
        _write(_results, JobResult(value, is_interim=True))


def main() -> NoReturn:
    """Run jobs until the parent closes the pipe; `sys.argv[1]` is a `ChildConfig`."""
    config = msgspec.json.decode(sys.argv[1], type=ChildConfig)
    if config.parent_pid:
        die_with_parent(config.parent_pid)
    requests, results = os.dup(0), os.dup(1)  # processes started by a job do not inherit them
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    set_limit(resource.RLIMIT_CORE, 0, 0)
    set_limit(resource.RLIMIT_DATA, config.max_bytes, config.max_bytes)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    try:
        handler = _load(config)
    except BaseException:  # noqa: BLE001  (user code may run here; the parent reports the error)
        _write(results, ReadyMessage(error=traceback.format_exc(limit=-1)))
        os._exit(1)
    _write(results, ReadyMessage())
    global _results  # noqa: PLW0603  (a process has one pipe of results)
    _results = results
    _serve(handler, requests, results, config.recycle_bytes)
    os._exit(0)  # also ends threads that jobs left behind


def _load(config: ChildConfig) -> Handler:
    module, _, name = config.handler.partition(":")
    handler: Handler = getattr(importlib.import_module(module), name)(**config.args)
    return handler


def _serve(handler: Handler, requests: int, results: int, recycle_bytes: int) -> None:
    while (request := _read(requests)) is not None:
        for job in msgspec.msgpack.decode(request, type=list[bytes]):
            value, error = _run_job(handler, job)
            is_last = _resident_bytes() > recycle_bytes
            _write(results, JobResult(value, error, is_last))
            if is_last:
                return


def _run_job(handler: Handler, job: bytes) -> tuple[bytes, str | None]:
    try:
        return handler(job), None
    except BaseException as error:  # noqa: BLE001  (a verifier's timeout and SystemExit are no Exception)
        return b"", f"{type(error).__name__}: {error}"


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * resource.getpagesize()
    except OSError:  # not Linux
        return 0


def _read(pipe: int) -> bytes | None:
    """Read the next frame; None if the parent has closed the pipe."""
    header = _read_exactly(pipe, HEADER_BYTES)
    return None if header is None else _read_exactly(pipe, frame_length(header))


def _read_exactly(pipe: int, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        chunk = os.read(pipe, size - len(data))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


def _write(pipe: int, message: object) -> None:
    remaining = memoryview(encode_frame(msgspec.msgpack.encode(message)))
    while remaining:
        remaining = remaining[os.write(pipe, remaining) :]


class ProcessPoolError(PenstockError):
    """A child could not be started, or ended while it ran a job."""


class JobError(Exception):
    """A job raised in its child; the message holds the original type and text."""


@dataclass(eq=False)
class JobBatch:
    """The jobs of one `ProcessPool.map` call."""

    remaining: int
    done: anyio.Event = field(default_factory=anyio.Event)
    is_cancelled: bool = False


@dataclass(eq=False)
class Job:
    """One job of a batch: bytes for the handler."""

    payload: bytes
    timeout_s: float
    batch: JobBatch
    attempts: int = 0
    """Children that ended while they ran this job."""
    interim: bytes | None = None
    """The last interim result that the job reported, in any child."""
    outcome: Outcome | None = None

    def finish(self, outcome: Outcome) -> None:
        """Set the outcome; only the first call counts."""
        if self.outcome is None:
            self.outcome = outcome
            self.batch.remaining -= 1
            if self.batch.remaining == 0:
                self.batch.done.set()
