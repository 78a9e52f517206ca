"""`penstock dashboard`: serve the pages until the process is stopped."""

import signal
from collections.abc import Sequence

import anyio

from workers.commands.output import print_line
from workers.dashboard.access import Access
from workers.dashboard.run_source import RunCatalog
from workers.dashboard.server import serve_dashboard


def run_dashboard(targets: Sequence[str], redis: str, access: Access, port: int) -> None:
    """Serve the pages of some runs, or of all below `runs/`, until SIGINT or SIGTERM.

    Raises:
        PenstockError: a target is no run, or the address cannot be used.
    """
    access.check()
    catalog = RunCatalog(targets, redis)

    async def serve() -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async with serve_dashboard(catalog, access, port) as url:
                print_line(f"listening on {url}")
                async for _ in signals:
                    return

    anyio.run(serve)
