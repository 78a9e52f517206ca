"""`/metrics`, `/health` and `/ready` of a process, answered by its event loop.

A process whose event loop stands still answers nothing, which a probe takes for what it is.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import Final, Generic, TypeVar
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import structlog
from aiohttp import hdrs, web
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, Info, ProcessCollector, generate_latest

from stream.connection.run_connection import RunConnection
from stream.errors import EngineError, PenstockError
from stream.operator.status import read_status
from workers.engine_api.http_server import listen
from workers.role.context import Readiness
from workers.role.prometheus import REGISTRIES
from workers.role.run_metrics import RunMetrics
from workers.settings import Settings

log = structlog.get_logger()

_MAX_AGE_S: Final = 1.0
"""How long an answer of the Redis server is used again, however often it is asked for."""
_ANSWER_TIMEOUT_S: Final = 2.0
_MAX_CONNECTIONS: Final = 256

T = TypeVar("T")


class ServerAnswer(Generic[T]):
    """What the Redis server last answered; read again when it is too old.

    Args:
        read: asks the server.
    """

    def __init__(self, read: Callable[[], Awaitable[T]]) -> None:
        self._read = read
        self._lock = anyio.Lock()
        self._read_at = -float("inf")
        self.value: T | None = None
        """None if the server did not answer."""

    async def refresh(self) -> T | None:
        """Return the value, read within the last second."""
        async with self._lock:
            if time.monotonic() - self._read_at >= _MAX_AGE_S:
                self.value = None
                with anyio.move_on_after(_ANSWER_TIMEOUT_S):
                    try:
                        self.value = await self._read()
                    except PenstockError as error:
                        log.debug("metrics.read_failed", why=f"{type(error).__name__}: {error}")
                self._read_at = time.monotonic()
            return self.value


@asynccontextmanager
async def serve_metrics(
    role: str, settings: Settings, readiness: Readiness, connection: RunConnection | None = None
) -> AsyncIterator[str]:
    """Serve at `run.metrics_address` until the context is left. An address that is taken is logged; the role works on.

    Args:
        role: `supervisor`, or a role; `feed` also serves the run's figures.
        settings: of the run.
        readiness: answers `/ready`.
        connection: to the run; None: `/ready` does not ask the Redis server.

    Yields:
        The URL; empty if nothing is served.
    """
    address = urlsplit(f"//{settings.run.metrics_address}")
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    ours = await anyio.to_thread.run_sync(version, "penstock")  # reads files
    info = Info("penstock", "Version, run and role of this process.", registry=registry)
    info.info({"role": role, "run": settings.run.name, "version": ours})
    for collector in REGISTRIES[role]:
        registry.register(collector)
    async with AsyncExitStack() as stack:
        app = _Pages(registry, readiness, connection, has_run_metrics=role == "feed").application()
        server = listen(app, address.hostname or "", address.port or 0, max_connections=_MAX_CONNECTIONS)
        url = ""
        try:
            url = await stack.enter_async_context(server)
            log.info("metrics.listening", url=url)
        except EngineError as error:
            remedy = "set run.metrics_address to a free port for this process"
            log.warning("metrics.not_served", address=settings.run.metrics_address, why=str(error), remedy=remedy)
        yield url


class _Pages:
    """Answers the requests."""

    def __init__(
        self,
        registry: CollectorRegistry,
        readiness: Readiness,
        connection: RunConnection | None,
        *,
        has_run_metrics: bool,
    ) -> None:
        self._registry, self._readiness = registry, readiness
        self._ping = ServerAnswer(connection.ping) if connection else None
        self._status = ServerAnswer(partial(read_status, connection)) if connection and has_run_metrics else None
        if (status := self._status) is not None:
            registry.register(RunMetrics(lambda: status.value))

    def application(self) -> web.Application:
        """Return the routes."""
        app = web.Application()
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/health", self.is_alive)
        app.router.add_get("/ready", self.is_ready)
        return app

    async def metrics(self, _: web.Request) -> web.Response:
        """Metrics in Prometheus' text format."""
        if self._status is not None:
            await self._status.refresh()
        text = await anyio.to_thread.run_sync(generate_latest, self._registry)  # reads files of the process
        return web.Response(body=text, headers={hdrs.CONTENT_TYPE: CONTENT_TYPE_PLAIN_0_0_4})

    async def is_alive(self, _: web.Request) -> web.Response:
        """200 while the event loop turns; no answer while it stands still."""
        return web.Response(text="ok\n")

    async def is_ready(self, _: web.Request) -> web.Response:
        """200 if the role can take work; 503 with the reason."""
        problem = self._readiness.find_problem()
        if not problem and self._ping is not None and not await self._ping.refresh():
            problem = "the Redis server does not answer"
        return web.Response(status=503 if problem else 200, text=f"{problem or 'ok'}\n")
