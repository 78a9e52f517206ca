"""HTTP servers of the engine protocol: they listen while a context is open and answer all errors in one format."""

import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
from aiohttp import web
from anyio.lowlevel import checkpoint

from stream.errors import EngineError, EngineRefusedError
from workers.engine_api.wire import error_body
from workers.runtime.ports import cannot_listen

_BACKLOG = 1024
_SHUTDOWN_TIMEOUT_S = 2.0
"""Seconds for requests in flight when the server closes."""
_ROUNDS_OF_ACCEPTING = 5
"""Rounds of the event loop before a server closes. asyncio never closes a connection whose acceptance was not finished
then; these suffice for clients that connected before and left already."""

MAX_BODY_BYTES = 64 * 1024 * 1024
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def listen(app: web.Application, host: str, port: int) -> AsyncIterator[str]:
    """Serve until the context is left; a client that disconnects cancels its handler.

    Args:
        app: what to serve.
        host: address to listen on.
        port: 0 for a free one.

    Yields:
        The URL, with the port really taken.

    Raises:
        EngineError: the address is taken, or none of this machine's.
    """
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_TIMEOUT_S)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port, backlog=_BACKLOG).start()
        except OSError as error:
            is_taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
            remedy = "choose another port" if is_taken else "name an address of this machine"
            raise EngineError(f"{cannot_listen(host, port, error)}; {remedy}") from error
        try:
            yield server_url(host, runner.addresses[0][1])
        finally:
            with anyio.CancelScope(shield=True):
                for _ in range(_ROUNDS_OF_ACCEPTING):
                    await checkpoint()
    finally:
        with anyio.CancelScope(shield=True):
            await runner.cleanup()


def server_url(host: str, port: int) -> str:
    """The URL of a server; an address of IPv6 stands in brackets there."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """4xx for what the client did, 500 for what we did."""
    try:
        return await handler(request)
    except EngineRefusedError as error:
        return error_response(400, str(error))
    except EngineError as error:
        return error_response(500, str(error))


def error_response(status: int, why: str) -> web.Response:
    """An answer of 4xx or 5xx, in OpenAI's form."""
    return web.Response(status=status, body=error_body(why), content_type="application/json")
