"""What servers answer when they do not do what was asked: what time may mend, and what is said of the rest."""

import ssl
from collections.abc import Iterator

from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    InvalidResponse,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import (
    ConnectionError as RedisConnectionError,
)
from redis.exceptions import (
    TimeoutError as RedisTimeoutError,
)

_CONNECTION_ERRORS = (RedisConnectionError, RedisTimeoutError, OSError)
GARBLED_REPLY_ERRORS = (InvalidResponse, ValueError, TypeError, LookupError, AttributeError)
"""No answer that redis-py could read; it drops the connection."""
HANDLED_ERRORS = (*_CONNECTION_ERRORS, *GARBLED_REPLY_ERRORS, ResponseError, RuntimeError)
"""All that is looked at; what neither passes nor is refused is raised as it is."""
_RETRYABLE_ERRORS = (
    BusyLoadingError,
    OutOfMemoryError,
    ReadOnlyError,
    NoScriptError,
    AskError,
    TryAgainError,
    ClusterDownError,
)
"""Also a slot that moves: its scripts need all of a run's keys in one place, so they wait until it has arrived."""
_RETRYABLE_PREFIXES = ("MISCONF", "BUSY ", "NOREPLICAS", "Protocol error")
"""Beginnings of other errors that pass: its disk is full, a script of somebody's takes long, it did not understand."""
_CLIENT_CERTIFICATE_ALERTS = (
    "CERTIFICATE_REQUIRED",
    "ALERT_BAD_CERTIFICATE",
    "ALERT_UNKNOWN_CA",
    "ALERT_HANDSHAKE_FAILURE",
)
_SCRIPT_DENIED_PREFIXES = ("ACL failure in script", "The user executing the script")
"""How Valkey, and Redis, say that a script's caller may not do what it does."""
_CLOSED_TRANSPORT_PREFIX = "unable to perform operation on"
"""Beginning of the RuntimeError of uvloop for who writes to a connection that was lost while he came to it."""


def is_connection_error(error: Exception) -> bool:
    """Whether there was no answer: the connection was lost, or never made."""
    return isinstance(error, _CONNECTION_ERRORS) or (
        isinstance(error, RuntimeError) and str(error).startswith(_CLOSED_TRANSPORT_PREFIX)
    )


def is_retryable(error: Exception) -> bool:
    """Whether time may mend it."""
    return (
        is_connection_error(error)
        or isinstance(error, (*GARBLED_REPLY_ERRORS, *_RETRYABLE_ERRORS))
        or str(error).startswith(_RETRYABLE_PREFIXES)
    )


def fatal_reason(error: Exception) -> str | None:
    """What is wrong, and the remedy, where waiting cannot help; None where it might, or where nobody knows."""
    for cause in _causes(error):
        match cause:
            case ssl.SSLCertVerificationError():
                why = getattr(cause, "verify_message", cause)
                return (
                    f"its certificate cannot be trusted ({why}); name the authority that signed it with "
                    "?ssl_ca_certs=FILE, and the host as the certificate does"
                )
            case ssl.SSLError() if any(
                word in (getattr(cause, "reason", None) or "") for word in _CLIENT_CERTIFICATE_ALERTS
            ):
                return "it wants a client certificate that it knows: ?ssl_certfile=FILE&ssl_keyfile=FILE"
            case PermissionError():
                return f"this user may not open its socket ({cause})"
            case AuthenticationError() | AuthorizationError():
                return f"it refuses us: {_password_problem(str(cause))}"
            case NoPermissionError():
                return _acl_problem(cause)
            case _:
                pass
    if str(error).startswith(_SCRIPT_DENIED_PREFIXES):
        return _acl_problem(error)
    if str(error).startswith(("DENIED", "DB index", "SELECT is not allowed", "invalid DB")):
        return f"it refuses us: {error}"
    return None


def describe_error(error: Exception) -> str:
    """An error in words."""
    match error:
        case AskError():
            return f"the run's slot is on its way to {error.host}:{error.port}"
        case InvalidResponse() | ValueError() | TypeError() | LookupError() | AttributeError():
            return f"it answers what is no answer: {error}"
        case _:
            pass
    code = getattr(error, "status_code", None)
    return f"{code} {error}" if code else str(error)


def _password_problem(text: str) -> str:
    if "without any password" in text:
        return "it needs no password, and the URL has one; leave it out, or give the server's default user one"
    if text.startswith("Authentication required"):
        return "it wants a password, and the URL has none; write redis://USER:PASSWORD@HOST, or redis://:PASSWORD@HOST"
    return f"wrong user or password ({text}); correct those in the URL, %-escaped"


def _acl_problem(error: Exception) -> str:
    return f"its ACL refuses us: {error}; `penstock acl RUN` prints the rules that each role needs"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error, and those that it was raised for; redis-py raises its own while it handles them."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__
