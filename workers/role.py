"""What every role is handed, whoever starts it."""

from collections.abc import Awaitable, Callable

import anyio
from msgspec import Struct

from stream.link import Link
from stream.stage import Terms
from workers.settings import Settings


class Role(Struct, kw_only=True, eq=False):
    """What every role is handed."""

    settings: Settings
    link: Link
    consumer: str
    """This process's name in the streams; never used again by another one."""
    stopping: anyio.Event
    """Set when a signal or `penstock stop` asks it to stop: claim nothing more, finish or give back what is held."""

    @property
    def terms(self) -> Terms:
        """Lease time and retry budgets."""
        d = self.settings.delivery
        return Terms(
            lease_s=d.lease_s,
            infra_attempts=d.infra_attempts,
            data_attempts=d.data_attempts,
            backoff_s=d.backoff_s,
        )


Main = Callable[[Role], Awaitable[None]]
"""A role: returns when the run has ended, or when it was asked to stop and has let go of everything."""
