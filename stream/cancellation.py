"""Cancel a block when an event is set."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio


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
