"""Exponential back-off with jitter: how long to wait before the next try.

Cancel a block when an event is set.
"""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from msgspec import Struct


class Backoff(Struct, frozen=True):
    """Delays that double from `first_s` up to `max_s`, each reduced by a random share of up to `jitter`.

    ::

        backoff = Backoff(0.1, 2.0)
        backoff.delay_s(1)      # 0.05 to 0.1
        backoff.delay_s(4)      # 0.4 to 0.8
        backoff.delay_s(100)    # 1.0 to 2.0
    """

    first_s: float
    max_s: float
    jitter: float = 0.5
    """Largest share of a delay that is taken off at random; it keeps clients from retrying in step."""

    def delay_s(self, attempt: int) -> float:
        """Return the seconds to wait after the given number of failed attempts (1 for the first)."""
        doublings = min(max(attempt - 1, 0), 60)
        return random.uniform(1.0 - self.jitter, 1.0) * min(self.first_s * 2.0**doublings, self.max_s)


@asynccontextmanager
async def cancel_on(event: anyio.Event) -> AsyncIterator[None]:
    """Run the block until it ends or `event` is set; then the block is cancelled and the code after it continues."""
    async with anyio.create_task_group() as tasks:

        async def watch() -> None:
            await event.wait()
            tasks.cancel_scope.cancel()

        tasks.start_soon(watch)
        yield
        tasks.cancel_scope.cancel()
