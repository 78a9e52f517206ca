"""A pool of processes that can be killed: for verifiers that hang, crash, leak, print, or need the main thread.

Each job runs in the main thread of a child process. One that is still at work past its deadline is ended by SIGKILL
from here, and nothing else is lost: the child is replaced, and the jobs that waited behind it go to another one. A
child dies with this process, has no standard streams but /dev/null, and is replaced after so many jobs, or when it
holds too much memory.

Why none of the known pools: pebble 5.2.3 ends a child by SIGTERM first (one that ignores it was answered 4.1 s after a
start with a deadline of 1 s), fails altogether when an idle child is killed from outside, and leaves a busy child
behind when its parent is killed; loky and the standard library have no deadline for a running job.
"""

import math
import os
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import structlog

from envs.call import Failed, Outcome
from envs.processes.child_main import ChildConfig
from envs.processes.child_process import ChildProcess
from envs.processes.jobs import Job, JobBatch, ProcessPoolError

log = structlog.get_logger()

_MAX_JOBS_PER_REQUEST = 32
_MAX_JOBS_PER_CHILD = 10_000
_RECYCLE_BYTES = 1 << 30
_MAX_BYTES = 4 << 30
_MAX_USELESS_CHILDREN = 3


class ProcessPool:
    """So many children, each made to run one handler. Use `ProcessPool.open`.

    Args:
        handler: `module:name` of a callable that, called with `args` in the child, returns a function from bytes to
            bytes.
        args: what it is called with; survives JSON.
        size: children.
        max_jobs_per_child: a child is replaced after so many.
        recycle_bytes: resident memory beyond which a child is replaced after its job.
        max_bytes: data memory beyond which a job gets a MemoryError.
    """

    def __init__(
        self,
        handler: str,
        args: Mapping[str, Any],
        size: int,
        *,
        max_jobs_per_child: int = _MAX_JOBS_PER_CHILD,
        recycle_bytes: int = _RECYCLE_BYTES,
        max_bytes: int = _MAX_BYTES,
    ) -> None:
        self.size = size
        self.started_count = 0
        """Children started until now, replacements included."""
        self._max_jobs_per_child = max_jobs_per_child
        self._config = ChildConfig(
            parent_pid=os.getpid(), handler=handler, args=dict(args), recycle_bytes=recycle_bytes, max_bytes=max_bytes
        )
        self._waiting: deque[Job] = deque()
        self._job_added = anyio.Event()
        self._children: set[ChildProcess] = set()

    @classmethod
    @asynccontextmanager
    async def open(
        cls, handler: str, args: Mapping[str, Any], size: int, **bounds: int
    ) -> AsyncIterator["ProcessPool"]:
        """A pool whose first child has started; all of them are killed at the end.

        Enter it from the thread that lives as long as the process: the children die with that thread.

        Raises:
            ProcessPoolError: the first child cannot be started; says why.
        """
        pool = cls(handler, args, size, **bounds)
        try:
            first = await pool._start_child()
            async with anyio.create_task_group() as serving:
                serving.start_soon(pool._run_child, first)
                for _ in range(size - 1):
                    serving.start_soon(pool._run_child, None)
                yield pool
                serving.cancel_scope.cancel()
        finally:
            for child in pool._children:
                child.kill()
            with anyio.CancelScope(shield=True):
                for child in tuple(pool._children):
                    await pool._discard_child(child)

    @property
    def pids(self) -> list[int]:
        """Process ids of the children that live."""
        return [child.pid for child in self._children if child.is_usable(self._max_jobs_per_child)]

    async def map(self, jobs: Sequence[bytes], timeout_s: float) -> list[Outcome]:
        """Run jobs, spread over the children.

        Args:
            jobs: for the handler.
            timeout_s: for each job, from when a child begins it. Waiting for a child is our load, and is not counted.

        Returns:
            In the jobs' order: `Returned` bytes, `Raised` with a `JobError` or (a child ended under it, twice) a
            `ProcessPoolError`, or `Overran`.
        """
        if not jobs:
            return []
        call = JobBatch(len(jobs))
        made = [Job(payload, timeout_s, call) for payload in jobs]
        self._waiting.extend(made)
        self._wake()
        try:
            await call.done.wait()
        finally:
            call.is_cancelled = True  # cancelled: those that wait are not begun any more
        return [job.outcome for job in made if job.outcome is not None]

    def _wake(self) -> None:
        self._job_added.set()
        self._job_added = anyio.Event()

    async def _next_jobs(self) -> deque[Job]:
        """Some of the jobs that wait; they are spread over the children, then sent several at a time."""
        while True:
            while self._waiting and self._waiting[0].batch.is_cancelled:
                self._waiting.popleft()
            if self._waiting:
                share = min(_MAX_JOBS_PER_REQUEST, math.ceil(len(self._waiting) / self.size))
                return deque(self._waiting.popleft() for _ in range(share))
            await self._job_added.wait()

    async def _run_child(self, child: ChildProcess | None) -> None:
        """Keep one child at work; another one in its place as soon as it is gone."""
        useless = 0  # children in a row that ended before they could begin a job
        while True:
            child = await self._usable_child(child)
            jobs = await self._next_jobs()
            child = await self._usable_child(child)  # it may have ended while there was nothing to do
            went_on = await child.run_jobs(jobs) if child is not None else False
            useless = 0 if went_on else useless + 1
            if useless >= _MAX_USELESS_CHILDREN:
                while jobs:
                    jobs.popleft().finish(Failed(ProcessPoolError(f"{useless} children in a row began nothing")))
                useless = 0
            if jobs:
                self._waiting.extendleft(reversed(jobs))
                self._wake()

    async def _usable_child(self, child: ChildProcess | None) -> ChildProcess | None:
        """The same child while it can work, else a new one; None where none can be started."""
        if child is not None:
            if child.is_usable(self._max_jobs_per_child):
                return child
            await self._discard_child(child)
        try:
            return await self._start_child()
        except ProcessPoolError as error:
            log.warning("process_pool.child_not_started", handler=self._config.handler, why=str(error))
            return None

    async def _start_child(self) -> ChildProcess:
        self.started_count += 1
        child = await ChildProcess.start(self._config)
        self._children.add(child)
        try:
            await child.wait_ready()
        except ProcessPoolError:
            await self._discard_child(child)
            raise
        return child

    async def _discard_child(self, child: ChildProcess) -> None:
        await child.close()
        self._children.discard(child)
