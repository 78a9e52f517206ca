"""When a worker is worn out: user code has left too many threads hanging in it, or has let it grow too large.

A thread cannot be stopped, and what it holds is lost to the process; only a new process gets it back. So a worker that
is worn out drains like one that was asked to stop, says why, and ends with an exit code that stands for nothing else.
"""

import os
from pathlib import Path

import anyio
import structlog

from envs.call import abandoned_threads
from workers.settings import Queue

log = structlog.get_logger()

_STATM = Path("/proc/self/statm")
_MIB = 1 << 20
_POLL_S = 1.0


class WorkerRecycler:
    """Watches this process.

    Args:
        queue: the bounds.
        stopping: set when one of them is reached.
    """

    def __init__(self, queue: Queue, stopping: anyio.Event) -> None:
        self.reason = ""
        """What wore it out; empty while nothing has."""
        self._queue = queue
        self._stopping = stopping

    async def watch(self) -> None:
        """Watch until a bound is reached, or the process ends."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch_threads)
            if self._queue.max_memory_mb:
                tasks.start_soon(self._watch_memory)

    async def _watch_threads(self) -> None:
        limit = self._queue.max_abandoned_threads
        await abandoned_threads.wait_for_count(limit)
        self._request_recycle(
            f"{limit} threads hang in the code of environments or reward functions (queue.max_abandoned_threads)"
        )

    async def _watch_memory(self) -> None:
        limit = self._queue.max_memory_mb
        while True:
            resident = await anyio.to_thread.run_sync(resident_bytes) // _MIB
            if resident >= limit:
                break
            await anyio.sleep(_POLL_S)  # nobody tells when a process grows
        self._request_recycle(f"it takes {resident} MiB of memory, of {limit} that it may (queue.max_memory_mb)")

    def _request_recycle(self, why: str) -> None:
        if not self.reason and not self._stopping.is_set():
            self.reason = why
            log.warning("worker.recycle_requested", why=why)
            self._stopping.set()


def resident_bytes() -> int:
    """Memory that this process holds; where the system does not tell, the most that it ever held."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return int(peak)  # macOS counts it in bytes
