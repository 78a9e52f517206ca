"""Let work that may end its process run alone in it."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio


class Isolation:
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
