"""One call of a script over a plain socket, for a command that asks once and exits.

To import redis-py, asyncio and anyio takes longer than all else that `penstock queues` does. This does without them,
and leaves every difficulty to them: for TLS, options in the URL, a cluster's redirection, and for any error it returns
None. The caller then opens a `RunConnection`, which retries, or says what is wrong and names the remedy.
"""

import hashlib
import socket
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

import hiredis

from stream.connection.keys import key_prefix
from stream.connection.scripts import load_script
from stream.connection.url import is_unambiguous, misread_part

_TIMEOUT_S = 2.0
"""For connecting, and for all answers to one packet."""
_READ_BYTES = 65536

Command = tuple[Any, ...]


def call_script_once(url: str, run: str, name: str, *args: str) -> Any | None:
    """Run `stream/lua/NAME.lua` on a run's keys and return its answer; None if that needs a `RunConnection`. Blocks.

    Args:
        url: of the server, `redis://` or `unix://`.
        run: the run's name.
        name: of the script. The answer may be lost, so it must be one that changes nothing.
        args: its arguments.
    """
    parts = urlsplit(url) if is_unambiguous(url) and not misread_part(url) else None
    if parts is None or parts.query or parts.scheme not in ("redis", "unix"):
        return None
    script = load_script(name)
    digest = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
    call: Command = ("EVALSHA", digest, 1, key_prefix(run), *args)
    try:
        login = _login(parts)
        with _connect(parts) as connection:
            *logged_in, answer = _exchange(connection, [*login, call])
            if isinstance(answer, hiredis.ReplyError) and str(answer).startswith("NOSCRIPT"):
                _, answer = _exchange(connection, [("SCRIPT", "LOAD", script), call])
    except (OSError, ValueError, hiredis.HiredisError):
        return None
    failed = any(isinstance(each, hiredis.ReplyError) for each in (*logged_in, answer))
    return None if failed else answer


def _connect(parts: SplitResult) -> socket.socket:
    if parts.scheme == "redis":
        return socket.create_connection((parts.hostname or "localhost", parts.port or 6379), _TIMEOUT_S)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_TIMEOUT_S)
    try:
        connection.connect(unquote(parts.path))
    except OSError:
        connection.close()
        raise
    return connection


def _login(parts: SplitResult) -> list[Command]:
    """Return the commands that come before any other."""
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    database = unquote(parts.path).strip("/") if parts.scheme == "redis" else ""
    return [
        *([("AUTH", user or "default", password)] if user or password else []),
        *([("SELECT", int(database))] if database else []),
    ]


def _exchange(connection: socket.socket, commands: Sequence[Command]) -> list[Any]:
    """Send commands in one packet and return their answers, of which some may be a `ReplyError`."""
    connection.sendall(b"".join([hiredis.pack_command(command) for command in commands]))
    reader, answers = hiredis.Reader(), list[Any]()
    deadline = time.monotonic() + _TIMEOUT_S
    while len(answers) < len(commands):
        if (left_s := deadline - time.monotonic()) <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        data = connection.recv(_READ_BYTES)
        if not data:
            raise ConnectionResetError("the server closed the connection")
        reader.feed(data)
        while (answer := reader.gets()) is not False:
            answers.append(answer)
    return answers
