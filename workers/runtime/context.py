"""What every role gets at its start."""

from collections.abc import Awaitable, Callable

import anyio
from msgspec import Struct, field

from stream.connection.run_connection import RunConnection
from stream.queue.stage import RetryPolicy
from workers.settings import Settings


class Readiness:
    """Whether a process can do its work, as `/ready` answers."""

    def __init__(self) -> None:
        self.find_problem: Callable[[], str] = lambda: "the role is starting"
        """Returns why the process cannot work now, empty if it can."""

    def mark_ready(self) -> None:
        """Note that the process has opened all that it needs."""
        self.find_problem = str


class WorkerContext(Struct, kw_only=True, eq=False):
    """Settings, connection and name of one worker process."""

    settings: Settings
    connection: RunConnection
    consumer: str
    """This process's name in the streams; no other process ever has the same."""
    stopping: anyio.Event
    """Set by a signal or `penstock stop`: the worker claims nothing more, and finishes or gives back what it holds."""
    has_folder: bool = True
    """The run's folder is on this machine. Only the trainer needs it."""
    readiness: Readiness = field(default_factory=Readiness)
    """The role says here when it is ready."""

    @property
    def retry_policy(self) -> RetryPolicy:
        """Lease time and failure limits."""
        queue = self.settings.queue
        return RetryPolicy(lease_s=queue.lease_s, infra_attempts=queue.max_attempts, backoff_s=queue.retry_delay_s)


RoleMain = Callable[[WorkerContext], Awaitable[None]]
"""The main function of a role. It returns when the run has ended, or after a stop request when all work is finished
or given back."""
