"""A pool of child processes that can be killed: for verifiers that hang, crash, leak, print, or need the main thread.

Each job runs in the main thread of a child process. A job past its deadline is ended by SIGKILL; only that job is lost,
the child is replaced, and jobs queued behind it run in another child. Children die with this process, have /dev/null as
standard streams, and are replaced after a number of jobs or when they hold too much memory.

Existing pools do not fit: pebble 5.2.3 sends SIGTERM first (a job that ignores it returned 4.1 s after its start at a
deadline of 1 s), breaks when an idle child is killed from outside, and leaves a busy child behind when its parent is
killed; loky and the standard library have no deadline for a running job.
"""

import math
import os
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import structlog

from envs.call import Failed, Outcome
from envs.processes.child_main import ChildConfig
from envs.processes.isolation import NO_ISOLATION, Isolation
from envs.processes.jobs import Job, JobBatch, ProcessPoolError
from envs.processes.pool_child import PoolChild

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
