"""Waiting: back-off before the next try, a block that an event cancels, async code for a synchronous caller."""

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from threading import Event, Thread
from typing import TypeVar

import anyio
from anyio.from_thread import BlockingPortal
from msgspec import Struct

_INTERRUPT_S = 10.0
"""After an interrupt: for what was begun to end, such as an engine."""
T = TypeVar("T")


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


def run_in_daemon_thread(main: Callable[[], Awaitable[T]]) -> T:
    """Run `main` on a separate event loop, and return its result or raise its exception.

    An interrupt cancels `main`, waits a while for its end, and is raised. Threads inherit whether they are daemons.
    Threads that hang in user code are children of this one, so they do not keep the process from exiting; with
    `anyio.from_thread.start_blocking_portal` they would.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    portals: list[tuple[BlockingPortal, anyio.CancelScope]] = []
    ended = Event()
    """Waited for instead of the thread: Python 3.11 takes a thread whose `join` was interrupted for ended."""

    async def run_until_cancelled() -> None:
        async with BlockingPortal() as portal:
            with anyio.CancelScope() as scope:
                portals.append((portal, scope))
                try:
                    results.append(await main())
                except anyio.get_cancelled_exc_class():
                    raise
                except BaseException as error:  # noqa: BLE001  (raised again in the caller's thread, in no group)
                    errors.append(error)

    def run() -> None:
        try:
            anyio.run(run_until_cancelled)
        finally:
            ended.set()

    try:
        Thread(target=run, daemon=True, name="penstock event loop").start()
        ended.wait()
    except KeyboardInterrupt:
        for portal, scope in portals:
            portal.start_task_soon(scope.cancel)
            ended.wait(_INTERRUPT_S)
        raise
    if errors:
        raise errors[0]
    return results[0]
