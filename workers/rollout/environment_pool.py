"""The environment slots of a worker: a fixed number per environment, each used by one episode at a time."""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Self

import anyio

from envs.call import CallRunner
from envs.factory import EnvironmentFactory
from stream.errors import DataError
from workers.role.concurrency import ConcurrencyLimit
from workers.rollout.environment_slot import EnvironmentSlot


class EnvironmentPool:
    """Environment slots by name, created when needed. Make and enter it within an event loop.

    Args:
        factories: by the environment's name.
        size: largest number of slots of each environment.
        limiter: bounds the threads that environments run in; default: only the number of slots does.
    """

    def __init__(
        self,
        factories: Mapping[str, EnvironmentFactory],
        *,
        size: int,
        limiter: anyio.CapacityLimiter | None = None,
    ) -> None:
        self._factories = factories
        self._calls = CallRunner(limiter)
        self._limits = {name: ConcurrencyLimit(size) for name in factories}
        self._idle: dict[str, list[EnvironmentSlot]] = {name: [] for name in factories}
        self._closing = anyio.create_task_group()

    async def __aenter__(self) -> Self:
        await self._closing.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for slots in self._idle.values():
            while slots:
                self._closing.start_soon(_close, slots.pop())
        # The task group does not see the error, so that the error leaves here as itself, not in an exception group.
        await self._closing.__aexit__(None, None, None)

    def slot(self, name: str | None) -> AbstractAsyncContextManager[EnvironmentSlot | None]:
        """Hold a slot of an environment; None for prompts without an environment.

        Raises:
            DataError: there is no environment of this name.
        """
        return _HeldSlot(self, name)

    async def acquire(self, name: str) -> EnvironmentSlot:
        """Wait for a slot; give it back with `release`.

        Raises:
            DataError: there is no environment of this name.
        """
        if name not in self._factories:
            raise DataError(f"no environment is called {name!r}; there are: {', '.join(self._factories) or 'none'}")
        limit = self._limits[name]
        await limit.wait_available()
        limit.acquire()
        idle = self._idle[name]
        return idle.pop() if idle else EnvironmentSlot(name, self._factories[name], self._calls)

    def release(self, slot: EnvironmentSlot) -> None:
        """Give a slot back. An instance that cannot be reused is closed in the background."""
        if slot.needs_replacement:
            self._closing.start_soon(_close, slot)
        else:
            self._idle[slot.name].append(slot)
        self._limits[slot.name].release()


class _HeldSlot:
    """What `slot` returns; a generator in its place would take a few microseconds more."""

    __slots__ = ("_name", "_pool", "_slot")

    def __init__(self, pool: EnvironmentPool, name: str | None) -> None:
        self._pool, self._name = pool, name
        self._slot: EnvironmentSlot | None = None

    async def __aenter__(self) -> EnvironmentSlot | None:
        if self._name is not None:
            self._slot = await self._pool.acquire(self._name)
        return self._slot

    async def __aexit__(self, *_: object) -> None:
        if self._slot is not None:
            self._pool.release(self._slot)


async def _close(slot: EnvironmentSlot) -> None:
    with anyio.CancelScope(shield=True):  # bounded by the deadline of `close`
        await slot.close()
