"""What every role is handed, whoever starts it."""

from collections.abc import Awaitable, Callable

import anyio
from msgspec import Struct

from stream.connection.run_connection import RunConnection
from stream.queue.stage import RetryPolicy
from workers.settings import Settings


class WorkerContext(Struct, kw_only=True, eq=False):
    """What every role is handed."""

    settings: Settings
    connection: RunConnection
    consumer: str
    """This process's name in the streams; never used again by another one."""
    stopping: anyio.Event
    """Set when a signal or `penstock stop` asks it to stop: claim nothing more, finish or give back what is held."""

    @property
    def retry_policy(self) -> RetryPolicy:
        """Lease time and retry budgets."""
        d = self.settings.queue
        return RetryPolicy(
            lease_s=d.lease_s,
            infra_attempts=d.max_attempts,
            backoff_s=d.retry_delay_s,
        )


RoleMain = Callable[[WorkerContext], Awaitable[None]]
"""A role: returns when the run has ended, or when it was asked to stop and has let go of everything."""
