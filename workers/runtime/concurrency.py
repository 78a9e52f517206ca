"""How much one worker may hold at once. Whoever wants more waits for room instead of asking again and again."""

import anyio


class ConcurrencyLimit:
    """A bound on concurrent work, taken before a task starts and given back when it ends.

    Args:
        limit: places.
        parent: another room, in which each of these places takes one as well. It is not asked whether it has one: what
            goes on there goes on, and only what comes next has to wait.
    """

    def __init__(self, limit: int, parent: "ConcurrencyLimit | None" = None) -> None:
        self.limit = limit
        self.parent = parent
        self.in_use = 0
        self._released = anyio.Event()

    async def wait_available(self) -> int:
        """Wait until there is room, and say for how many."""
        while self.in_use >= self.limit:
            await self._released.wait()
        return self.limit - self.in_use

    def acquire(self) -> None:
        """Take one place; call it before the task is started, so that a burst of claims cannot overshoot."""
        self.in_use += 1
        if self.parent is not None:
            self.parent.acquire()

    def release(self) -> None:
        """Give one place back."""
        self.in_use -= 1
        if self.parent is not None:
            self.parent.release()
        self._released.set()
        self._released = anyio.Event()
