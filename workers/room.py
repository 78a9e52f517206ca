"""How much one worker may hold at once. Whoever wants more waits for room instead of asking again and again."""

import anyio


class Room:
    """A bound on concurrent work, taken before a task starts and given back when it ends."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken = 0
        self._given = anyio.Event()

    async def wait(self) -> int:
        """Wait until there is room, and say for how many."""
        while self.taken >= self.size:
            await self._given.wait()
        return self.size - self.taken

    def take(self) -> None:
        """Take one place; call it before the task is started, so that a burst of claims cannot overshoot."""
        self.taken += 1

    def give(self) -> None:
        """Give one place back."""
        self.taken -= 1
        self._given.set()
        self._given = anyio.Event()
