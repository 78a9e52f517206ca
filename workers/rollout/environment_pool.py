"""The slots of a worker: so many of each environment, each for one episode at a time."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

import anyio

from envs.call import CallRunner
from envs.factory import EnvironmentFactory
from stream.errors import DataError
from workers.rollout.environment_slot import EnvironmentSlot


class EnvironmentPool:
    """Slots by environment, made when needed, never more than `size` of one environment. Enter it before use.

    Args:
        factories: by the environment's name.
        size: slots of each environment.
        limiter: bounds the threads that environments run in; `size` of them unless given.
    """

    def __init__(
        self, factories: Mapping[str, EnvironmentFactory], *, size: int, limiter: anyio.CapacityLimiter | None = None
    ) -> None:
        self._factories = factories
        self._caller = CallRunner(limiter or anyio.CapacityLimiter(size))
        self._permits = {name: anyio.Semaphore(size, fast_acquire=True) for name in factories}
        self._idle: dict[str, list[EnvironmentSlot]] = {name: [] for name in factories}
        self._closing: anyio.abc.TaskGroup | None = None

    async def __aenter__(self) -> Self:
        self._closing = anyio.create_task_group()
        await self._closing.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for slots in self._idle.values():
            while slots:
                self._close_in_background(slots.pop())
        if self._closing is not None:  # not told of the error, so that it leaves here as itself, not in a group
            await self._closing.__aexit__(None, None, None)

    @asynccontextmanager
    async def slot(self, name: str | None) -> AsyncIterator[EnvironmentSlot | None]:
        """Have a slot of that environment to yourself; None for data without an environment.

        Raises:
            DataError: no environment bears this name.
        """
        if name is None:
            yield None
            return
        slot = await self.acquire(name)
        try:
            yield slot
        finally:
            self.release(slot)

    async def acquire(self, name: str) -> EnvironmentSlot:
        """Wait for a slot of that environment."""
        if name not in self._factories:
            raise DataError(f"no environment is called {name!r}; there are: {', '.join(self._factories) or 'none'}")
        await self._permits[name].acquire()
        return (
            self._idle[name].pop() if self._idle[name] else EnvironmentSlot(name, self._factories[name], self._caller)
        )

    def release(self, slot: EnvironmentSlot) -> None:
        """Give a slot back. A spoiled one loses its instance; nobody waits for that."""
        if slot.needs_replacement:
            self._close_in_background(slot)
        else:
            self._idle[slot.name].append(slot)
        self._permits[slot.name].release()

    def _close_in_background(self, slot: EnvironmentSlot) -> None:
        if self._closing is None:
            raise RuntimeError("the pool is not entered")
        self._closing.start_soon(_close, slot)


async def _close(slot: EnvironmentSlot) -> None:
    with anyio.CancelScope(shield=True):  # bounded by close's own deadline
        await slot.close()
