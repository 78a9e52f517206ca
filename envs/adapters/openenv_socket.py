"""One WebSocket to an OpenEnv server: one request and its response at a time.

Responses have no id, so a late one would be read as the response to the next request. Therefore **a socket is aborted
after an incomplete exchange.**
"""

import json
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import anyio

from envs.call import describe_error
from envs.references import import_extra
from stream.errors import EnvironmentFailure, ReferenceNotFoundError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_CONNECT_S = 10.0
_LEAVE_S = 1.0


class RequestRefusedError(EnvironmentFailure):
    """The server answered a request with an error of that request, not of the connection, which stays usable."""


class EnvironmentSocket:
    """One connection, which is one environment on the server."""

    def __init__(self, session: Any, stream: Any, url: str) -> None:
        self._session = session
        self._stream = stream
        self._url = url
        self._lock = anyio.Lock()
        self.is_closed = False

    @classmethod
    async def connect(cls, url: str, max_message_bytes: int) -> "EnvironmentSocket":
        """Open a session on the server.

        Raises:
            EnvironmentFailure: the server does not answer.
        """
        aiohttp = import_extra("aiohttp", "openenv")
        session = aiohttp.ClientSession()
        try:
            with anyio.fail_after(_CONNECT_S):
                stream = await session.ws_connect(f"{url}/ws", max_msg_size=max_message_bytes)
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await session.close()
            if isinstance(error, aiohttp.ClientError | OSError | TimeoutError):
                raise EnvironmentFailure(f"cannot connect to {url}/ws: {describe_error(error)}") from error
            raise
        return cls(session, stream, url)

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, max_message_bytes: int) -> "AsyncIterator[EnvironmentSocket]":
        """Open a session, and close it on exit."""
        socket = await cls.connect(url, max_message_bytes)
        try:
            yield socket
        finally:
            await socket.close()

    async def request(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message and return the `data` of its response; an incomplete exchange aborts the socket.

        Raises:
            RequestRefusedError: the message does not fit, or the environment raised; the next request may succeed.
            EnvironmentFailure: the connection failed, or the server reported an error.
        """
        async with self._lock:
            if self.is_closed:
                raise EnvironmentFailure(f"the connection to {self._url} was closed")
            try:
                await self._stream.send_str(json.dumps(message))
                return _response_data(await self._stream.receive(), self._url)
            except RequestRefusedError:
                raise  # the exchange is complete
            except BaseException as error:
                await self.abort()
                if isinstance(error, Exception) and not isinstance(error, EnvironmentFailure):
                    raise EnvironmentFailure(f"the connection to {self._url} broke: {describe_error(error)}") from error
                raise

    async def action_schema(self) -> dict[str, Any]:
        """Return the JSON schema of the server's actions."""
        try:
            with anyio.fail_after(_CONNECT_S):
                async with self._session.get(f"http{self._url.removeprefix('ws')}/schema") as response:
                    schema: dict[str, Any] = (await response.json())["action"]
                    return schema
        except (OSError, ValueError, KeyError, TypeError) as error:  # aiohttp's own errors are OSErrors or ValueErrors
            raise EnvironmentFailure(
                f"it has no MCP tools, and no schema of its actions: {describe_error(error)}"
            ) from error

    async def close(self) -> None:
        """End the session and close the connection."""
        with anyio.move_on_after(_LEAVE_S), suppress(Exception):
            if not self.is_closed:
                await self._stream.send_str('{"type": "close"}')
                await self._stream.close()
        await self.abort()

    async def abort(self) -> None:
        """Close the connection without a closing handshake."""
        self.is_closed = True
        with anyio.CancelScope(shield=True):
            await self._session.close()


def _response_data(message: Any, url: str) -> dict[str, Any]:
    """Return the `data` of a response."""
    if not isinstance(message.data, str):
        raise EnvironmentFailure(f"the server at {url} closed the connection ({message.type.name} {message.data})")
    response = json.loads(message.data)
    data = response.get("data") if isinstance(response, dict) else None
    if not isinstance(data, dict):
        raise EnvironmentFailure(f"the server at {url} sent an invalid message: {message.data[:200]}")
    if response.get("type") != "error":
        return data
    if data.get("code") == "VALIDATION_ERROR":
        errors = data.get("errors") or data.get("message")
        text = errors if isinstance(errors, str) else json.dumps(errors, ensure_ascii=False)
        raise RequestRefusedError(f"the arguments do not fit: {text}")
    if data.get("code") == "EXECUTION_ERROR":
        raise RequestRefusedError(str(data.get("message") or "the environment raised an error without a message"))
    raise EnvironmentFailure(f"the server at {url} says {data.get('code')}: {data.get('message')}")


def websocket_url(url: str) -> str:
    """Convert a server's URL to its WebSocket URL without a path.

    Raises:
        ReferenceNotFoundError: it is not a URL of a supported scheme.
    """
    for scheme, socket in (("https://", "wss://"), ("http://", "ws://")):
        if url.startswith(scheme):
            url = socket + url.removeprefix(scheme)
    if not url.startswith(("ws://", "wss://")):
        raise ReferenceNotFoundError(f"{url!r} is not the URL of an OpenEnv server; write ws://host:port")
    return url.rstrip("/").removesuffix("/ws")
