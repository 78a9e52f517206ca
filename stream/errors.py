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
    """The exception in user code behind it, if it is known."""


class SettingsError(PenstockError):
    """A setting is unknown, of the wrong type, out of range, or conflicts with another one."""


class ServerError(PenstockError):
    """The Redis server cannot be reached, refuses us, is too old, or is configured so that it would lose work."""


class StorageError(PenstockError):
    """Object storage cannot be reached, refuses us, or holds something damaged."""


class RecordError(PenstockError):
    """Bytes that are not a valid record: wrong checksum, not msgpack, or a field of the wrong type."""


class NewerSchemaError(RecordError):
    """A record of a newer major schema version. It is left for workers that can read it."""


class LeaseLostError(PenstockError):
    """The lease on an entry expired and another worker may have the entry; the result must be discarded."""


class FencedError(PenstockError):
    """Another trainer has taken over this run."""


class NoRunError(PenstockError):
    """The server knows no run of this name, or not yet."""


class RunMismatchError(PenstockError):
    """Settings, server and run folder do not describe the same run."""


class ReferenceNotFoundError(PenstockError):
    """A reference to an environment or a reward function cannot be resolved."""


class EnvironmentFailure(PenstockError):  # noqa: N818  (users raise it: a failure of the world, not an error of the code)
    """Raise this in an environment when the world failed, not the model. The completion becomes invalid, never 0."""


class EngineError(PenstockError):
    """An engine did not answer, or answered with something unexpected."""


class EngineUnavailableError(EngineError):
    """No engine answers. The work is given back, at no cost."""


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
        cause: the exception behind it, if it is known.
    """

    def __init__(self, message: str, cause: ErrorCause | None = None) -> None:
        super().__init__(message)
        self.cause = cause
