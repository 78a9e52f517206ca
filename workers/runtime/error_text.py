"""Errors as text, with the exception in user code that is behind them."""

import msgspec

from envs.call import error_cause, is_library
from stream.causes import ErrorCause
from stream.errors import (
    EnvironmentFailure,
    PenstockError,
    ReferenceNotFoundError,
    ServerError,
    SettingsError,
    StorageError,
)

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
