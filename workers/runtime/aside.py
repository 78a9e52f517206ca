"""A coroutine run to its end by code that is not async, in a thread that never keeps the process from ending."""

from collections.abc import Awaitable, Callable
from threading import Thread
from typing import TypeVar

import anyio

T = TypeVar("T")


def run_aside(main: Callable[[], Awaitable[T]]) -> T:
    """Run it on an event loop of its own, and return what it returns, or raise what it raises.

    In a daemon thread: threads that hang in user's code are its children, and end with the process.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(anyio.run(main))
        except BaseException as error:  # noqa: BLE001  (raised again in the caller's thread)
            errors.append(error)

    thread = Thread(target=run, daemon=True, name="penstock aside")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
