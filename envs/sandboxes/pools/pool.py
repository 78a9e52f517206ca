"""A pool of child processes that can be killed: for verifiers that hang, crash, leak, print, or need the main thread.

Each job runs in the main thread of a child process. A job past its deadline is ended by SIGKILL; only that job is lost,
the child is replaced, and jobs queued behind it run in another child. Children die with this process, have /dev/null as
standard streams, and are replaced after a number of jobs or when they hold too much memory.

Existing pools do not fit: pebble 5.2.3 sends SIGTERM first (a job that ignores it returned 4.1 s after its start at a
deadline of 1 s), breaks when an idle child is killed from outside, and leaves a busy child behind when its parent is
killed; loky and the standard library have no deadline for a running job.

`PoolChild` is the parent's side of one child.
"""

import math
import os
import signal
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import anyio
import msgspec
import structlog
from anyio import to_thread
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from envs.call import Failed, Ok, Outcome, TimedOut
from envs.sandboxes.pools.child_main import (
    HEADER_BYTES,
    ChildConfig,
    Job,
    JobBatch,
    JobError,
    JobResult,
    ProcessPoolError,
    ReadyMessage,
    encode_frame,
    frame_length,
)
from envs.sandboxes.pools.isolation import NO_ISOLATION, Isolation

START_TIMEOUT_S = 120.0
"""Time for a child to import the handler."""
_MAX_ATTEMPTS = 2
_EXIT_TIMEOUT_S = 5.0
_PIPE_ERRORS = (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)


class PoolChild:
    """One child process: runs jobs with deadlines, and is killed when one passes its deadline."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None  # noqa: S101  (for mypy: both are pipes)
        assert process.stdout is not None  # noqa: S101
        self._process = process
        self._requests = process.stdin
        self._results = BufferedByteReceiveStream(process.stdout)
        self._jobs_done = 0
        self._ended = False

    @classmethod
    async def start(cls, config: ChildConfig, isolation: Isolation = NO_ISOLATION) -> "PoolChild":
        """Start a child process.

        Args:
            config: what it runs.
            isolation: what it finds.

        Raises:
            ProcessPoolError: the process cannot be started.
        """
        try:
            with anyio.CancelScope(shield=True):  # cancelled half-way, the process would leak
                with await to_thread.run_sync(isolation.launch, config) as start:
                    process = await anyio.open_process(
                        start.command, stderr=None, start_new_session=True, **start.options
                    )
        except OSError as error:
            raise ProcessPoolError(f"a child cannot be started: {error}") from error
        return cls(process)

    @property
    def pid(self) -> int:
        """Process id, also the id of its session."""
        return self._process.pid

    def is_usable(self, max_jobs: int) -> bool:
        """Return whether the child is alive and has run fewer than `max_jobs` jobs."""
        return not self._ended and self._process.returncode is None and self._jobs_done < max_jobs

    async def wait_ready(self) -> None:
        """Wait until the child has loaded the handler.

        Raises:
            ProcessPoolError: it ended, timed out, or the handler cannot be loaded.
        """
        with anyio.move_on_after(START_TIMEOUT_S):
            try:
                ready = msgspec.msgpack.decode(await self._receive(), type=ReadyMessage)
            except _PIPE_ERRORS as error:
                raise ProcessPoolError("a child ended before it was ready") from error
            if ready.error:
                raise ProcessPoolError(f"a child could not load its handler:\n{ready.error.rstrip()}")
            return
        raise ProcessPoolError(f"a child was not ready within {START_TIMEOUT_S:g} s")

    async def run_jobs(self, jobs: deque[Job]) -> bool:
        """Run jobs; finished ones leave the queue, those not started stay in it.

        Returns:
            Whether any job made progress: finished, timed out, or used up an attempt. If none did, the child is at
            fault rather than a job.
        """
        before = _attempts_left(jobs)
        request = msgspec.msgpack.encode([job.payload for job in jobs])
        self._ended = not await self._send(request, jobs[0].timeout_s)
        while jobs and not self._ended:
            await self._receive_result(jobs)
        if self._ended:
            self.kill()
        return _attempts_left(jobs) < before

    async def _send(self, request: bytes, timeout_s: float) -> bool:
        """Send a request; return whether the child read it."""
        with anyio.move_on_after(timeout_s), suppress(*_PIPE_ERRORS):
            await self._requests.send(encode_frame(request))
            return True
        return False

    async def _receive_result(self, jobs: deque[Job]) -> None:
        """Wait for the result of the first job and finish it."""
        job = jobs[0]
        with anyio.move_on_after(job.timeout_s) as scope:
            try:
                result = await self._receive_final(job)
            except _PIPE_ERRORS:
                self._ended = True
                job.attempts += 1
                if job.attempts >= _MAX_ATTEMPTS:
                    message = f"{_MAX_ATTEMPTS} processes ended while they ran it"
                    jobs.popleft().finish(Failed(ProcessPoolError(message), job.interim))
                return
            self._jobs_done += 1
            self._ended = result.is_last
            jobs.popleft().finish(Ok(result.value) if result.error is None else Failed(JobError(result.error)))
        if scope.cancelled_caught:
            self.kill()
            jobs.popleft().finish(TimedOut(job.timeout_s, job.interim))

    async def _receive_final(self, job: Job) -> JobResult:
        """Wait for a job's result; interim ones are kept with the job."""
        while (result := msgspec.msgpack.decode(await self._receive(), type=JobResult)).is_interim:
            job.interim = result.value
        return result

    async def _receive(self) -> bytes:
        return await self._results.receive_exactly(frame_length(await self._results.receive_exactly(HEADER_BYTES)))

    def kill(self) -> None:
        """Kill the child and all processes of its session."""
        self._ended = True
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Kill the child and wait until it has exited."""
        self.kill()
        with anyio.CancelScope(shield=True), anyio.move_on_after(_EXIT_TIMEOUT_S), suppress(OSError):
            await self._process.aclose()


def _attempts_left(jobs: deque[Job]) -> int:
    return sum(_MAX_ATTEMPTS - job.attempts for job in jobs)


log = structlog.get_logger()

_MAX_JOBS_PER_REQUEST = 32
_MAX_USELESS_CHILDREN = 3


@dataclass(frozen=True, kw_only=True)
class ChildLimits:
    """When a child is replaced, and how much memory its jobs may use."""

    max_jobs: int = 10_000
    """Jobs after which a child is replaced."""
    recycle_bytes: int = 1 << 30
    """Resident memory above which a child is replaced after its job."""
    max_bytes: int = 4 << 30
    """Data memory above which a job gets a MemoryError."""


class ProcessPool:
    """A fixed number of child processes that run one handler. Create it with `ProcessPool.open`.

    Args:
        handler: `module:name` of a callable that, called with `args` in the child, returns a function from bytes to
            bytes.
        args: keyword arguments of that callable; JSON-serializable.
        size: number of children.
        limits: when children are replaced.
        isolation: what children find of this machine.
    """

    def __init__(
        self,
        handler: str,
        args: Mapping[str, Any],
        size: int,
        limits: ChildLimits = ChildLimits(),
        isolation: Isolation = NO_ISOLATION,
    ) -> None:
        self.size = size
        self.isolation = isolation
        self.started_count = 0
        """Children started so far, replacements included."""
        self._max_jobs = limits.max_jobs
        self._config = ChildConfig(
            parent_pid=os.getpid(),
            handler=handler,
            args=dict(args),
            recycle_bytes=limits.recycle_bytes,
            max_bytes=limits.max_bytes,
        )
        self._waiting: deque[Job] = deque()
        self._job_added = anyio.Event()
        self._children: set[PoolChild] = set()

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        handler: str,
        args: Mapping[str, Any],
        size: int,
        limits: ChildLimits = ChildLimits(),
        isolation: Isolation = NO_ISOLATION,
    ) -> AsyncIterator["ProcessPool"]:
        """Open a pool after its first child has started; kill all children on exit.

        Enter it from a thread that lives as long as the process: children die with the thread that started them.

        Raises:
            ProcessPoolError: the first child cannot be started.
        """
        pool = cls(handler, args, size, limits, isolation)
        try:
            first = await pool._start_child()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(pool._run_child, first)
                for _ in range(size - 1):
                    tasks.start_soon(pool._run_child, None)
                yield pool
                tasks.cancel_scope.cancel()
        finally:
            for child in pool._children:
                child.kill()
            with anyio.CancelScope(shield=True):
                for child in tuple(pool._children):
                    await pool._discard_child(child)

    @property
    def pids(self) -> list[int]:
        """Process ids of the usable children."""
        return [child.pid for child in self._children if child.is_usable(self._max_jobs)]

    async def map(self, jobs: Sequence[bytes], timeout_s: float) -> list[Outcome]:
        """Run jobs, spread over the children.

        Args:
            jobs: payloads for the handler.
            timeout_s: deadline of each job, from when a child starts it; waiting for a child does not count.

        Returns:
            One outcome for each job, in order: `Ok` with bytes, `TimedOut`, or `Failed` with a `JobError` (the job
            raised) or a `ProcessPoolError` (two children ended while they ran it). `TimedOut` and the last hold the
            job's interim result, if it reported one.
        """
        if not jobs:
            return []
        batch = JobBatch(len(jobs))
        queued = [Job(payload, timeout_s, batch) for payload in jobs]
        self._waiting.extend(queued)
        self._wake()
        try:
            await batch.done.wait()
        finally:
            batch.is_cancelled = True  # jobs still waiting are not started any more
        return [job.outcome for job in queued if job.outcome is not None]

    def _wake(self) -> None:
        self._job_added.set()
        self._job_added = anyio.Event()

    async def _next_jobs(self) -> deque[Job]:
        """Wait for jobs and take this child's share of them."""
        while True:
            while self._waiting and self._waiting[0].batch.is_cancelled:
                self._waiting.popleft()
            if self._waiting:
                share = min(_MAX_JOBS_PER_REQUEST, math.ceil(len(self._waiting) / self.size))
                return deque(self._waiting.popleft() for _ in range(share))
            await self._job_added.wait()

    async def _run_child(self, child: PoolChild | None) -> None:
        """Feed one child with jobs; replace it whenever it ends."""
        useless = 0  # consecutive children that ended before they started a job
        while True:
            child = await self._usable_child(child)
            jobs = await self._next_jobs()
            child = await self._usable_child(child)  # it may have ended while idle
            progressed = await child.run_jobs(jobs) if child is not None else False
            useless = 0 if progressed else useless + 1
            if useless >= _MAX_USELESS_CHILDREN:
                while jobs:
                    jobs.popleft().finish(Failed(ProcessPoolError(f"{useless} children in a row started no job")))
                useless = 0
            if jobs:
                self._waiting.extendleft(reversed(jobs))
                self._wake()

    async def _usable_child(self, child: PoolChild | None) -> PoolChild | None:
        """Return the child if it can run jobs, else a new one; None if none can be started."""
        if child is not None:
            if child.is_usable(self._max_jobs):
                return child
            await self._discard_child(child)
        try:
            return await self._start_child()
        except ProcessPoolError as error:
            log.warning("process_pool.child_not_started", handler=self._config.handler, why=str(error))
            return None

    async def _start_child(self) -> PoolChild:
        self.started_count += 1
        child = await PoolChild.start(self._config, self.isolation)
        self._children.add(child)
        try:
            await child.wait_ready()
        except ProcessPoolError:
            await self._discard_child(child)
            raise
        return child

    async def _discard_child(self, child: PoolChild) -> None:
        await child.close()
        self._children.discard(child)
