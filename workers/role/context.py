"""What every role gets at its start, and errors as texts that name the exception in user code behind them."""

from collections.abc import Awaitable, Callable

import anyio
import msgspec
from msgspec import Struct, field

from envs.call import error_cause, is_library
from stream.causes import ErrorCause
from stream.connection.run_connection import RunConnection
from stream.errors import (
    EnvironmentFailure,
    PenstockError,
    ReferenceNotFoundError,
    ServerError,
    SettingsError,
    StorageError,
)
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


_NOT_OF_USER_CODE = (SettingsError, ServerError, StorageError)
"""What is behind these was raised in a library: a URL that does not answer, a file that is not TOML."""
_OF_USER_CODE = (ReferenceNotFoundError, EnvironmentFailure)
"""What is behind these is user code, even if it was installed like a library."""


def find_cause(error: BaseException) -> ErrorCause | None:
    """Return the exception in user code behind an error; None if there is none, or if it is not known."""
    if isinstance(error, PenstockError):
        if error.cause is not None or error.__cause__ is None or isinstance(error, _NOT_OF_USER_CODE):
            return error.cause
        cause = error_cause(error.__cause__, "user code")
        return cause if cause.file and (isinstance(error, _OF_USER_CODE) or not is_library(cause.file)) else None
    cause = error_cause(error, "user code")
    if not cause.file:
        return None
    return msgspec.structs.replace(cause, source="a library") if is_library(cause.file) else cause


def error_text(error: BaseException) -> str:
    """Return what is stored with an entry that an error gives back; `stream.causes.parse_cause` reads the cause."""
    text = str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
    cause = find_cause(error)
    return f"{text}\n{cause.render()}" if cause else text
