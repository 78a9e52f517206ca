"""How much work one worker holds at a time; work that may end its process runs alone in it."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio


class ConcurrencyLimit:
    """A number of slots for concurrent work. A slot is acquired before a task starts and released when it ends.

    Args:
        limit: the number of slots.
        parent: a second limit; each slot of this limit also takes a slot of the parent. Acquiring never waits for the
            parent: work that waits for the parent itself starts later instead.
    """

    def __init__(self, limit: int, parent: "ConcurrencyLimit | None" = None) -> None:
        self.limit = limit
        self.parent = parent
        self.in_use = 0
        self._released: anyio.Event | None = None
        """Set while a task waits for it."""

    async def wait_available(self) -> int:
        """Wait for a free slot, and return the number of free slots."""
        while self.in_use >= self.limit:
            self._released = self._released or anyio.Event()
            await self._released.wait()
        return self.limit - self.in_use

    def acquire(self) -> None:
        """Take a slot. Call it before the task is started, so that many claims at once cannot exceed the limit."""
        self.in_use += 1
        if self.parent is not None:
            self.parent.acquire()

    def release(self) -> None:
        """Free a slot."""
        self.in_use -= 1
        if self.parent is not None:
            self.parent.release()
        if self._released is not None:
            self._released.set()
            self._released = None


class SharedExclusiveLock:
    """Shared and exclusive work of one process.

    Exclusive work waits until no other work is running, and no other work may start until it ends. So if it ends the
    process, it ends nothing else.
    """

    def __init__(self) -> None:
        self.is_closed = False
        """Exclusive work is running or waiting."""
        self._shared = 0
        self._changed: anyio.Event | None = None
        """Set while a task waits for it."""

    async def wait_open(self) -> None:
        """Wait until no exclusive work is running or waiting."""
        while self.is_closed:
            await self._wait_for_change()

    def close(self) -> None:
        """Announce exclusive work, which `exclusive` runs; until it ends, start nothing."""
        self.is_closed = True

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Run the body beside other shared work."""
        self._shared += 1
        try:
            yield
        finally:
            self._shared -= 1
            self._notify()

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run work beside other shared work."""
        with self.shared():
            await work()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Run the body alone, once `close` has been called and the shared work has ended; then open again."""
        try:
            while self._shared:
                await self._wait_for_change()
            yield
        finally:
            self.is_closed = False
            self._notify()

    async def _wait_for_change(self) -> None:
        self._changed = self._changed or anyio.Event()
        await self._changed.wait()

    def _notify(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None
