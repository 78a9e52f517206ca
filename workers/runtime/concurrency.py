"""A limit on how much work one worker holds at the same time."""

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
