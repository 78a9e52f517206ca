"""The event loop of this process's background tasks: sessions and pools that outlive the call that opened them."""

import threading
from functools import partial

import anyio
from anyio.from_thread import BlockingPortal

_START_S = 30.0
_lock = threading.Lock()
_portals: list[BlockingPortal] = []


def background_loop() -> BlockingPortal:
    """Return the way into an event loop in a daemon thread, which lives as long as this process.

    Environments are called in threads that come and go, and what they open has to stay open: so it belongs to a task of
    this loop.

    Raises:
        TimeoutError: the thread did not start.
    """

    async def serve(ready: threading.Event) -> None:
        async with BlockingPortal() as portal:
            _portals.append(portal)
            ready.set()
            await portal.sleep_until_stopped()

    with _lock:
        if not _portals:
            ready = threading.Event()
            threading.Thread(target=partial(anyio.run, serve, ready), name="background loop", daemon=True).start()
            if not ready.wait(_START_S):
                raise TimeoutError(f"the thread of the background loop did not start within {_START_S:g} s")
    return _portals[0]
