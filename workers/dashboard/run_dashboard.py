"""`penstock dashboard`: serve the pages until the process is stopped."""

import secrets
import signal
from collections.abc import Sequence

import anyio
import msgspec

from workers.dashboard.access import Access
from workers.dashboard.server import serve_dashboard
from workers.engine_api.http_access import is_loopback
from workers.runs.catalog import Runs


def run_dashboard(targets: Sequence[str], redis: str, access: Access, port: int) -> None:
    """Serve the pages of some runs, or of all below `runs/`, until SIGINT or SIGTERM.

    An address that other machines reach, and changes, need a token: a random one is made if there is none, and printed
    in the address.

    Raises:
        PenstockError: a target is no run, or the address cannot be used.
    """
    shown = ""
    if not access.token and (access.allow_changes or not is_loopback(access.host)):
        access = msgspec.structs.replace(access, token=secrets.token_urlsafe(16))
        shown = f"/?token={access.token}"
    runs = Runs(targets, redis)

    async def serve() -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async with serve_dashboard(runs, access, port) as url:
                print(f"listening on {url}{shown}", flush=True)  # noqa: T201  (this is the command's output)
                async for _ in signals:
                    return

    anyio.run(serve)
