"""Process pools of this process, each started once and used from any thread: environments are synchronous."""

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import anyio
import msgspec
from anyio.abc import TaskStatus

from envs.call import Failed, Ok, Outcome
from envs.call.threads import background_loop
from envs.sandboxes.pools.forked import WALL_FACTOR
from envs.sandboxes.pools.isolation import Isolation
from envs.sandboxes.pools.pool import ChildLimits, ProcessPool

_lock = threading.Lock()
_pools: dict[tuple[Any, ...], tuple[Future[Any], ProcessPool]] = {}
"""Each with the task that keeps it open."""


def run_in_pool(
    handler: str, args: Mapping[str, Any], isolation: Isolation, jobs: Sequence[bytes], timeout_s: float
) -> list[Outcome]:
    """Run jobs in the pool of a handler; see `ProcessPool.map`. Blocks this thread.

    Raises:
        ProcessPoolError: see `start_pool`.
    """
    return background_loop().call(start_pool(handler, args, isolation).map, jobs, timeout_s)


def start_pool(handler: str, args: Mapping[str, Any], isolation: Isolation) -> ProcessPool:
    """Return the pool of a handler, started by the first call. Blocks this thread meanwhile.

    Raises:
        ProcessPoolError: the first child cannot be started.
    """
    loop = background_loop()
    key = (os.getpid(), handler, msgspec.json.encode(dict(args)), isolation)
    with _lock:
        if key not in _pools or _pools[key][0].done():  # it only ends by an error
            _pools[key] = loop.start_task(_serve, handler, args, isolation)
        return _pools[key][1]


def pool_timeout_s(cpu_s: int) -> float:
    """Return the deadline of a job that runs work of so much processor time in a fork; the fork's own is earlier."""
    return (WALL_FACTOR + 1) * cpu_s


def finished(outcome: Outcome) -> bytes | None:
    """Return the result of a job that runs work in a fork; None: nothing is known of the work.

    Work that ended its child, twice, has the job's interim result. A job past its deadline has none: its fork would
    have used up its processor time before that, so the machine is too busy.
    """
    if isinstance(outcome, Ok):
        return bytes(outcome.value)
    return outcome.interim if isinstance(outcome, Failed) else None


async def _serve(
    handler: str, args: Mapping[str, Any], isolation: Isolation, *, task_status: TaskStatus[ProcessPool]
) -> None:
    """Keep a pool open as long as this process lives."""
    size = min(4, os.cpu_count() or 1)
    async with ProcessPool.open(handler, args, size, ChildLimits(), isolation) as pool:
        task_status.started(pool)
        await anyio.sleep_forever()
