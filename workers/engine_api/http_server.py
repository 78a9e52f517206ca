"""HTTP servers of a run: one listener for all of them, one format of errors, and free ports.

What is served through `listen` answers only what its `AccessRules` allow, has a limit of connections, and ends those
that bring no request or do not read the answer (`http_connections`).
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import cast

import anyio
from aiohttp import hdrs, web
from anyio.lowlevel import checkpoint

from stream.errors import EngineError, EngineRefusedError
from workers.engine_api.http_access import AccessRules
from workers.engine_api.http_connections import MAX_CONNECTIONS, ConnectionLimit
from workers.engine_api.wire import error_body

_SHUTDOWN_TIMEOUT_S = 2.0
"""Seconds for requests in flight when the server closes."""
_ROUNDS_OF_ACCEPTING = 5
"""Rounds of the event loop before a server closes. asyncio never closes a connection whose acceptance was not finished
then; these suffice for clients that connected before and left already."""

MAX_BODY_BYTES = 64 * 1024 * 1024
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def listen(
    app: web.Application,
    host: str,
    port: int,
    *,
    rules: AccessRules | None = None,
    max_connections: int = MAX_CONNECTIONS,
    cancels_handlers: bool = True,
) -> AsyncIterator[str]:
    """Serve until the context is left.

    Args:
        app: what to serve.
        host: address to listen on.
        port: 0 for a free one.
        rules: which requests are answered; default: those that use a name of `host`, none of other sites' pages.
        max_connections: at most; fewer if the process may open few files (`ConnectionLimit`).
        cancels_handlers: a client that disconnects cancels its handler.

    Yields:
        The URL, with the port really taken.

    Raises:
        EngineError: the address is taken, or none of this machine's.
    """
    runner = web.AppRunner(
        app, access_log=None, handler_cancellation=cancels_handlers, shutdown_timeout=_SHUTDOWN_TIMEOUT_S
    )
    limit = ConnectionLimit(max_connections)
    app.middlewares.insert(0, _outermost_middleware(rules or AccessRules(host=host), limit))
    await runner.setup()
    try:
        port = await limit.start_accepting(cast(web.Server, runner.server), host, port)
        try:
            yield server_url(host, port)
        finally:
            limit.stop_accepting()
            with anyio.CancelScope(shield=True):
                for _ in range(_ROUNDS_OF_ACCEPTING):
                    await checkpoint()
    finally:
        with anyio.CancelScope(shield=True):
            await runner.cleanup()
            limit.close()


def server_url(host: str, port: int) -> str:
    """The URL of a server; an address of IPv6 stands in brackets there."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _outermost_middleware(rules: AccessRules, limit: ConnectionLimit) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Return the outermost middleware: every request passes it, also one to a route that does not exist."""

    @web.middleware
    async def enter(request: web.Request, handler: Handler) -> web.StreamResponse:
        limit.begin_request(request)
        refusal = rules.find_refusal(request)
        if refusal is None:
            return await handler(request)
        if "text/html" in request.headers.get(hdrs.ACCEPT, ""):
            return web.Response(status=refusal.status, text=f"{refusal.why}\n")
        return error_response(refusal.status, refusal.why)

    return enter


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """4xx for what the client did, 500 for what we did."""
    try:
        return await handler(request)
    except EngineRefusedError as error:
        return error_response(400, str(error))
    except RecursionError:  # nothing here recurses but over what a request holds
        return error_response(400, "the request is nested too deeply")
    except EngineError as error:
        return error_response(500, str(error))


def error_response(status: int, why: str) -> web.Response:
    """An answer of 4xx or 5xx, in OpenAI's form."""
    return web.Response(status=status, body=error_body(why), content_type="application/json")
