"""Replaces a worker process that user code has used up: too many hanging threads, or too much memory.

A thread cannot be stopped, and only a new process gets back what it holds. So the worker drains as after a stop
request, logs the reason, and exits with a code that means only this; the supervisor starts a new process.
"""

import anyio
import psutil
import structlog

from envs.call import abandoned_threads
from workers.settings import Queue

log = structlog.get_logger()

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

    def __init__(self, queue: Queue, stopping: anyio.Event) -> None:
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
