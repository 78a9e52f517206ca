"""Penstock's exceptions.

::

    PenstockError
    ├── SettingsError
    ├── ServerError
    ├── StorageError
    ├── RecordError
    │   └── NewerSchemaError
    ├── LeaseLostError
    ├── FencedError
    ├── NoRunError
    ├── RunMismatchError
    ├── ReferenceNotFoundError
    ├── EnvironmentFailure
    ├── EngineError
    │   ├── EngineUnavailableError
    │   └── EngineRefusedError
    ├── ServiceError
    │   ├── ServiceUnavailableError
    │   └── ServiceRefusedError
    ├── DataError
    └── RunFailedError

Messages name what failed, where, and the remedy.
"""

from stream.causes import ErrorCause


class PenstockError(Exception):
    """Base class of all errors that Penstock raises."""

    cause: ErrorCause | None = None
    """The exception in user code that caused the error, if it is known."""


class SettingsError(PenstockError):
    """A setting is unknown, of the wrong type, out of range, or conflicts with another one."""


class ServerError(PenstockError):
    """The Redis server cannot be reached, refuses access, is too old, or is configured so that it would lose work."""


class StorageError(PenstockError):
    """Object storage cannot be reached, refuses access, or holds damaged data."""


class RecordError(PenstockError):
    """Bytes that are not a valid record: wrong checksum, not msgpack, or a field of the wrong type."""


class NewerSchemaError(RecordError):
    """A record of a newer major schema version. It stays in its queue for workers that can read it."""


class LeaseLostError(PenstockError):
    """The lease on an entry expired and another worker may have the entry; the result must be discarded."""


class FencedError(PenstockError):
    """Another trainer has taken over this run."""


class NoRunError(PenstockError):
    """The server has no run of this name, or does not have it yet."""


class RunMismatchError(PenstockError):
    """Settings, server and run folder do not describe the same run."""


class ReferenceNotFoundError(PenstockError):
    """A reference to an environment or a reward function cannot be resolved."""


class EnvironmentFailure(PenstockError):  # noqa: N818  (users raise it; it is not an error of the code)
    """For environments to raise if something other than the model failed: the completion becomes invalid, never 0."""


class EngineError(PenstockError):
    """An engine did not answer, or answered with something unexpected."""


class EngineUnavailableError(EngineError):
    """No engine answers. The work goes back to its queue, and no failure is counted."""


class EngineRefusedError(EngineError):
    """The engine refused this request because of its content (4xx). It is never retried."""


class ServiceError(PenstockError):
    """A reward model or a judge did not answer, or answered with something unexpected."""


class ServiceUnavailableError(ServiceError):
    """The service could not be reached: no connection, no answer in time, 5xx, 408 or 429, on every attempt."""


class ServiceRefusedError(ServiceError):
    """The service refused this request because of its content (4xx). It is never retried."""


class DataError(PenstockError):
    """A prompt file, or a row of it, cannot be read."""


class RunFailedError(PenstockError):
    """A run, or one of its roles, failed permanently.

    Args:
        message: what failed, where, and the remedy.
        cause: the exception that caused the failure, if it is known.
    """

    def __init__(self, message: str, cause: ErrorCause | None = None) -> None:
        super().__init__(message)
        self.cause = cause
