"""`/metrics`, `/health` and `/ready` of a process, answered by an event loop in a thread of its own.

The process's own loop takes no part in it: a scrape costs it nothing, and a process whose loop is stuck still says so.
Figures that are on the Redis server are read by the loop, at most once a second however often they are scraped.
"""

import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import Final, Generic, TypeVar
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import structlog
from aiohttp import hdrs, web
from anyio.from_thread import BlockingPortal, start_blocking_portal
from prometheus_client import CollectorRegistry, Info, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from stream.errors import EngineError
from workers.runtime.health import RoleHealth
from workers.runtime.http_server import listen

log = structlog.get_logger()

_MAX_AGE_S = 1.0
_ANSWER_TIMEOUT_S = 2.0
"""Seconds for the event loop to read what a scrape needs."""
_MAX_CONNECTIONS: Final = 256
_MAX_THREADS: Final = 4
"""Threads that read figures for answers; further requests wait for one."""

T = TypeVar("T")


class Snapshot(Generic[T]):
    """The last result of a coroutine function, read again by the event loop when a thread asks and it is too old.

    Args:
        portal: of the event loop.
        read: returns the value.
        max_age_s: how long a value is returned again.
    """

    def __init__(self, portal: BlockingPortal, read: Callable[[], Awaitable[T]], max_age_s: float = _MAX_AGE_S) -> None:
        self._portal, self._read, self._max_age_s = portal, read, max_age_s
        self._lock = threading.Lock()
        self._value: T | None = None
        self._read_at = -float("inf")

    def get(self) -> T | None:
        """Return the value; None if it cannot be read now. Call it in another thread than the event loop's."""
        with self._lock:
            if time.monotonic() - self._read_at >= self._max_age_s:
                self._value = self._read_now()
                self._read_at = time.monotonic()
            return self._value

    def _read_now(self) -> T | None:
        try:
            return self._portal.start_task_soon(self._read_in_time).result(_ANSWER_TIMEOUT_S + 1)
        except Exception as error:  # noqa: BLE001  (a scrape must not end a role; a value that is missing is reported)
            log.debug("metrics.read_failed", why=f"{type(error).__name__}: {error}")
            return None

    async def _read_in_time(self) -> T:
        with anyio.fail_after(_ANSWER_TIMEOUT_S):
            return await self._read()


@asynccontextmanager
async def open_portal() -> AsyncIterator[BlockingPortal]:
    """Open a portal through which threads call the event loop; calls in progress are cancelled at the end."""
    async with BlockingPortal() as portal:
        try:
            yield portal
        finally:
            with anyio.CancelScope(shield=True):
                await portal.stop(cancel_remaining=True)


@asynccontextmanager
async def serve_metrics(
    address: str,
    collectors: Sequence[Collector],
    health: RoleHealth,
    info: dict[str, str],
    *,
    find_server_problem: Callable[[], str] = str,
    list_targets: Callable[[], Iterable[tuple[str, str]]] | None = None,
) -> AsyncIterator[str]:
    """Serve until the context is left. An address that is taken is logged; the role works without.

    Args:
        address: `HOST:PORT`; port 0: a free one. Empty: serve nothing.
        collectors: what `/metrics` reports besides the process itself.
        health: answers `/health` and `/ready`.
        info: labels of `penstock_info`.
        find_server_problem: returns why the Redis server cannot be used, for `/ready`; empty if it can. Called in a
            thread.
        list_targets: returns role and `HOST:PORT` of each process to scrape, for `/targets`; None: no such page.

    Yields:
        The URL; empty if nothing is served.
    """
    if not address:
        yield ""
        return
    pages = _Pages(_registry(collectors, info), health, find_server_problem)
    app = pages.application()
    if list_targets is not None:
        app.router.add_get("/targets", partial(_answer_targets, list_targets, info["run"]))
    stack = ExitStack()
    try:
        url = await anyio.to_thread.run_sync(_start, stack, app, address)
        if not url:
            yield ""
            return
        log.info("metrics.listening", url=url)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(health.watch)
            yield url
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(stack.close)


def _registry(collectors: Sequence[Collector], info: dict[str, str]) -> CollectorRegistry:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    Info("penstock", "Version, run and role of this process.", registry=registry).info(info)
    for collector in collectors:
        registry.register(collector)
    return registry


class _Pages:
    """Answers the requests; figures are read in threads, since reading them may wait for the process's own loop."""

    def __init__(self, registry: CollectorRegistry, health: RoleHealth, find_server_problem: Callable[[], str]) -> None:
        self._registry, self._health, self._find_server_problem = registry, health, find_server_problem
        self._threads: anyio.CapacityLimiter | None = None

    def application(self) -> web.Application:
        """Return the routes."""
        app = web.Application()
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/health", self.is_alive)
        app.router.add_get("/ready", self.is_ready)
        return app

    async def metrics(self, request: web.Request) -> web.Response:
        """Metrics in Prometheus' text format."""
        encode, kind = choose_encoder(request.headers.get(hdrs.ACCEPT, ""))
        names = request.query.getall("name[]", [])
        registry = self._registry.restricted_registry(names) if names else self._registry
        answer = web.Response(body=await self._in_thread(lambda: encode(registry)), headers={hdrs.CONTENT_TYPE: kind})
        answer.enable_compression()
        return answer

    async def is_alive(self, _: web.Request) -> web.Response:
        """200 while the role works; 503 with the reason if it is stuck; no answer if user code holds Python."""
        return _health_answer(self._health.liveness_problem())

    async def is_ready(self, _: web.Request) -> web.Response:
        """200 if the role can take work; 503 with the reason."""
        problem = self._health.readiness_problem()
        return _health_answer(problem or await self._in_thread(self._find_server_problem))

    async def _in_thread(self, read: Callable[[], T]) -> T:
        if self._threads is None:  # a limiter belongs to a loop
            self._threads = anyio.CapacityLimiter(_MAX_THREADS)
        return await anyio.to_thread.run_sync(read, limiter=self._threads)


def _health_answer(problem: str) -> web.Response:
    return web.Response(status=503 if problem else 200, text=f"{problem or 'ok'}\n")


async def _answer_targets(
    list_targets: Callable[[], Iterable[tuple[str, str]]], run: str, _: web.Request
) -> web.Response:
    """Of `penstock run`: the processes to scrape, for Prometheus' HTTP service discovery."""
    groups = [{"targets": [address], "labels": {"role": role, "run": run}} for role, address in list_targets()]
    return web.json_response(groups)


def _start(stack: ExitStack, app: web.Application, address: str) -> str:
    """Serve in a thread until the stack is closed; returns the URL, empty if the address cannot be had."""
    host = urlsplit(f"//{address}")
    portal = stack.enter_context(start_blocking_portal(name="penstock metrics"))
    server = listen(app, host.hostname or "", host.port or 0, max_connections=_MAX_CONNECTIONS)
    try:
        return stack.enter_context(portal.wrap_async_context_manager(server))
    except EngineError as error:
        stack.close()
        log.warning(
            "metrics.not_served",
            address=address,
            why=str(error),
            remedy="set run.metrics_address to a free port for this process",
        )
        return ""
