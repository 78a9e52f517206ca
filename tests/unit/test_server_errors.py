"""Which server errors are retryable, and which are reported immediately with a remedy."""

import asyncio
import ssl

import pytest
import uvloop
from redis._parsers.base import BaseParser
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from stream.connection.server_errors import (
    HANDLED_ERRORS,
    describe_error,
    fatal_reason,
    is_connection_error,
    is_retryable,
)


def answered(line: str) -> ResponseError:
    """Parse a server's error reply as redis-py does, which removes the code from most of them."""
    error = BaseParser.parse_error(line)
    assert isinstance(error, Exception)
    return error


def while_connecting(cause: Exception) -> Exception:
    """Chain the errors as redis-py does: it raises its connection error while it handles the socket's."""
    try:
        try:
            raise cause
        except OSError as error:
            raise RedisConnectionError(f"Error connecting: {error}")  # noqa: B904
    except RedisConnectionError as error:
        return error


@pytest.mark.parametrize(
    "line",
    [
        "LOADING Redis is loading the dataset in memory",
        "OOM command not allowed when used memory > 'maxmemory'.",
        "READONLY You can't write against a read only replica.",
        "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.",
        "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
        "NOREPLICAS Not enough good replicas to write.",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        "CLUSTERDOWN Hash slot not served",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        "ASK 12 127.0.0.1:7001",
        "NOSCRIPT No matching script. Please use EVAL.",
        "ERR max number of clients reached",
        "ERR Protocol error: invalid bulk length",
    ],
)
def test_retryable_errors(line):
    error = answered(line)
    assert fatal_reason(error) is None
    assert is_retryable(error)
    assert describe_error(error)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (answered("NOAUTH Authentication required."), "the URL has none; write redis://USER:PASSWORD@HOST"),
        (answered("WRONGPASS invalid username-password pair or user is disabled."), "correct them in the URL"),
        (answered("NOPERM User x has no permissions to run the 'hset' command"), "docs/redis.md"),
        (answered("DENIED Redis is running in protected mode because ..."), "DENIED"),
        (while_connecting(PermissionError(13, "Permission denied")), "has no permission to open its socket"),
        (while_connecting(ssl.SSLCertVerificationError("no")), "ssl_ca_certs=FILE"),
    ],
)
def test_fatal_errors_name_the_remedy(error, remedy):
    assert remedy in str(fatal_reason(error))


@pytest.mark.parametrize(
    "cause", [ConnectionRefusedError(111, "refused"), ssl.SSLError("unexpected EOF"), OSError("no")]
)
def test_lost_connections_are_connection_errors(cause):
    error = while_connecting(cause)
    assert fatal_reason(error) is None
    assert is_retryable(error)


@pytest.mark.parametrize(
    "line", ["ERR unknown command 'HSET'", "WRONGTYPE Operation against a key", "NOGROUP No such key"]
)
def test_other_errors_are_neither_retryable_nor_fatal(line):
    error = answered(line)
    assert fatal_reason(error) is None
    assert not is_retryable(error)


def test_writing_to_a_closed_uvloop_transport_is_a_connection_error():
    """uvloop raises a RuntimeError where asyncio drops the data."""

    async def write_after_the_end() -> None:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.transport.abort()
        await asyncio.sleep(0.01)
        server.close()
        writer.writelines([b"PING"])

    with pytest.raises(HANDLED_ERRORS) as caught:
        uvloop.run(write_after_the_end())
    assert type(caught.value) is RuntimeError
    assert is_connection_error(caught.value)
    assert is_retryable(caught.value)
    assert not is_retryable(RuntimeError("a defect of ours"))
