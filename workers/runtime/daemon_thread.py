"""Runs a coroutine to its end from synchronous code, in a daemon thread."""

from collections.abc import Awaitable, Callable
from threading import Thread
from typing import TypeVar

import anyio

T = TypeVar("T")


def run_in_daemon_thread(main: Callable[[], Awaitable[T]]) -> T:
    """Run `main` on a separate event loop, and return its result or raise its exception.

    Threads inherit whether they are daemons. Threads that hang in user code are children of this one, so they do not
    keep the process from exiting; with `anyio.from_thread.start_blocking_portal` they would.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(anyio.run(main))
        except BaseException as error:  # noqa: BLE001  (raised again in the caller's thread)
            errors.append(error)

    thread = Thread(target=run, daemon=True, name="penstock event loop")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
