"""Errors of Redis servers: which calls to repeat, and which messages the other errors get."""

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
"""Errors of redis-py for a reply that it could not parse; it then drops the connection."""
HANDLED_ERRORS = (*_CONNECTION_ERRORS, *GARBLED_REPLY_ERRORS, ResponseError, RuntimeError)
"""All errors that this module classifies; one that is neither retryable nor fatal is raised unchanged."""
_RETRYABLE_ERRORS = (
    BusyLoadingError,
    OutOfMemoryError,
    ReadOnlyError,
    NoScriptError,
    AskError,
    TryAgainError,
    ClusterDownError,
)
"""Errors of a server that will take the call later. A cluster gives some of them while it moves the run's slot: scripts
need all of a run's keys on one node."""
_RETRYABLE_PREFIXES = ("MISCONF", "BUSY ", "NOREPLICAS", "Protocol error")
"""Beginnings of other retryable errors: the disk is full, another client's script is running, too few replicas are
connected, the request was garbled."""
_CLIENT_CERTIFICATE_ALERTS = (
    "CERTIFICATE_REQUIRED",
    "ALERT_BAD_CERTIFICATE",
    "ALERT_UNKNOWN_CA",
    "ALERT_HANDSHAKE_FAILURE",
)
"""Parts of OpenSSL's reasons when a server requires a client certificate that it trusts."""
_SCRIPT_DENIED_PREFIXES = ("ACL failure in script", "The user executing the script")
"""Valkey's and Redis' errors for a script whose caller lacks a permission."""
_CLOSED_TRANSPORT_PREFIX = "unable to perform operation on"
"""Beginning of uvloop's RuntimeError for a write to a connection that has just been lost."""


def is_connection_error(error: Exception) -> bool:
    """Return whether there was no answer: the connection was lost, or never made."""
    return isinstance(error, _CONNECTION_ERRORS) or (
        isinstance(error, RuntimeError) and str(error).startswith(_CLOSED_TRANSPORT_PREFIX)
    )


def is_disk_error(error: Exception) -> bool:
    """Return whether the server answers that it cannot write to its disk."""
    return isinstance(error, ResponseError) and str(error).startswith("MISCONF")


def is_retryable(error: Exception) -> bool:
    """Return whether a repeated call may succeed."""
    return (
        is_connection_error(error)
        or isinstance(error, (*GARBLED_REPLY_ERRORS, *_RETRYABLE_ERRORS))
        or str(error).startswith(_RETRYABLE_PREFIXES)
    )


def fatal_reason(error: Exception) -> str | None:
    """Return the problem and its remedy if repeating the call cannot help; None if it can, or if that is not known."""
    for cause in _causes(error):
        match cause:
            case ssl.SSLCertVerificationError():
                why = getattr(cause, "verify_message", cause)
                return (
                    f"its certificate cannot be trusted ({why}); name the authority that signed it with "
                    "?ssl_ca_certs=FILE, and use the host name of the certificate"
                )
            case ssl.SSLError() if any(
                word in (getattr(cause, "reason", None) or "") for word in _CLIENT_CERTIFICATE_ALERTS
            ):
                return "it requires a client certificate that it knows: ?ssl_certfile=FILE&ssl_keyfile=FILE"
            case PermissionError():
                return f"this user has no permission to open its socket ({cause})"
            case AuthenticationError() | AuthorizationError():
                return f"it refuses access: {_password_problem(str(cause))}"
            case NoPermissionError():
                return _acl_problem(cause)
            case _:
                pass
    if str(error).startswith(_SCRIPT_DENIED_PREFIXES):
        return _acl_problem(error)
    if str(error).startswith(("DENIED", "DB index", "SELECT is not allowed", "invalid DB")):
        return f"it refuses access: {error}"
    return None


def describe_error(error: Exception) -> str:
    """Return an error as text for people."""
    match error:
        case AskError():
            return f"the run's slot is being moved to {error.host}:{error.port}"
        case InvalidResponse() | ValueError() | TypeError() | LookupError() | AttributeError():
            return f"its reply could not be parsed: {error}"
        case _:
            pass
    code = getattr(error, "status_code", None)
    return f"{code} {error}" if code else str(error)


def _password_problem(text: str) -> str:
    if "without any password" in text:
        return "it needs no password, but the URL has one; remove it, or set one for the server's default user"
    if text.startswith("Authentication required"):
        return (
            "it requires a password, but the URL has none; write redis://USER:PASSWORD@HOST, or redis://:PASSWORD@HOST"
        )
    return f"wrong user or password ({text}); correct them in the URL, %-escaped"


def _acl_problem(error: Exception) -> str:
    return f"its ACL refuses access: {error}; the aclfile in docs/redis.md has the rules that each role needs"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes; redis-py raises its own errors while it handles others."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__
