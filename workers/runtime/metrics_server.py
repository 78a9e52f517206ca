"""`/metrics`, `/health` and `/ready` of a process, answered by threads of their own.

The event loop takes no part in it: a scrape costs it nothing, and a process whose loop is stuck still says so.
Figures that are on the Redis server are read by the loop, at most once a second however often they are scraped.
"""

import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from socketserver import ThreadingMixIn
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import anyio
import anyio.to_thread
import structlog
from anyio.from_thread import BlockingPortal
from prometheus_client import CollectorRegistry, Info, ProcessCollector, make_wsgi_app
from prometheus_client.registry import Collector

from workers.runtime.health import RoleHealth

log = structlog.get_logger()

_MAX_AGE_S = 1.0
_ANSWER_TIMEOUT_S = 2.0
"""Seconds for the event loop to read what a scrape needs."""
_SHUTDOWN_POLL_S = 0.2
_REQUEST_TIMEOUT_S = 10.0

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
    pages: dict[str, Callable[[], tuple[str, str]]] = {
        "/health": lambda: _text_page(health.liveness_problem()),
        "/ready": lambda: _text_page(health.readiness_problem() or find_server_problem()),
    }
    if list_targets is not None:
        targets = list_targets
        pages["/targets"] = lambda: ("200 OK", json.dumps(_target_groups(targets(), info)))
    server = await anyio.to_thread.run_sync(_listen, address, _make_app(_registry(collectors, info), pages))
    if server is None:
        yield ""
        return
    url = f"http://{address.rpartition(':')[0]}:{server.server_port}"
    log.info("metrics.listening", url=url)
    threading.Thread(
        target=server.serve_forever, args=(_SHUTDOWN_POLL_S,), daemon=True, name="penstock metrics"
    ).start()
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(health.watch)
            yield url
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(_close, server)


def _registry(collectors: Sequence[Collector], info: dict[str, str]) -> CollectorRegistry:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    Info("penstock", "Version, run and role of this process.", registry=registry).info(info)
    for collector in collectors:
        registry.register(collector)
    return registry


def _make_app(registry: CollectorRegistry, pages: dict[str, Callable[[], tuple[str, str]]]) -> Callable[..., Any]:
    serve_registry = make_wsgi_app(registry)

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            return serve_registry(environ, start_response)  # type: ignore[no-any-return, no-untyped-call, unused-ignore]
        if path in pages:
            status, text = pages[path]()
        else:
            status, text = "404 Not Found", f"there are {', '.join(['/metrics', *pages])}"
        kind = "application/json" if path == "/targets" else "text/plain; charset=utf-8"
        start_response(status, [("Content-Type", kind)])
        return [f"{text}\n".encode()]

    return app


def _text_page(problem: str) -> tuple[str, str]:
    return ("503 Service Unavailable", problem) if problem else ("200 OK", "ok")


def _target_groups(targets: Iterable[tuple[str, str]], info: dict[str, str]) -> list[dict[str, object]]:
    """Return the answer of Prometheus' HTTP service discovery."""
    return [{"targets": [address], "labels": {"role": role, "run": info["run"]}} for role, address in targets]


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _IPv6Server(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = _REQUEST_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (the base class's name)
        """Log nothing: a scrape every few seconds is no event."""


def _listen(address: str, app: Callable[..., Any]) -> WSGIServer | None:
    parts = urlsplit(f"//{address}")
    host = parts.hostname or ""
    server_class = _IPv6Server if ":" in host else _Server
    try:
        return make_server(host, parts.port or 0, app, server_class=server_class, handler_class=_Handler)
    except OSError as error:
        log.warning(
            "metrics.not_served",
            address=address,
            why=str(error),
            remedy="set run.metrics_address to a free port for this process",
        )
        return None


def _close(server: WSGIServer) -> None:
    server.shutdown()
    server.server_close()
