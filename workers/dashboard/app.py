"""The dashboard's web server: routes, streams of events, files that pages load, errors as pages, and its command."""

import importlib.resources
import secrets
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import anyio
import msgspec
import structlog
from aiohttp import web

from stream.errors import PenstockError
from workers.dashboard.access import Access, access_middleware, add_headers
from workers.dashboard.dashboard import Dashboard
from workers.dashboard.dead_letters_page import change_dead_letters, dead_letter_page, dead_letters_page
from workers.dashboard.evaluations_page import evaluations_page
from workers.dashboard.group_page import (
    group_page,
    message_fragment,
    messages_fragment,
    snapshot_fragment,
    tokens_fragment,
)
from workers.dashboard.groups_page import groups_page
from workers.dashboard.live_view import RenderPart
from workers.dashboard.run_pages import (
    charts_json,
    comparison_json,
    comparison_page,
    logs_page,
    render_pipeline,
    render_state,
    render_steps,
    run_page,
    runs_page,
    settings_page,
)
from workers.dashboard.sandboxes_page import render_sandboxes, sandboxes_page
from workers.dashboard.templating import describe_exception, error_page, load_templates, log_page_failure
from workers.dashboard.timeline_page import timeline_page
from workers.dashboard.workers_page import (
    engines_fragment,
    in_flight_page,
    render_in_flight,
    render_workers,
    workers_page,
)
from workers.engine_api.http_access import is_loopback
from workers.engine_api.http_server import listen
from workers.runs.catalog import Runs
from workers.runs.run import Run

log = structlog.get_logger()

_PAGE_S: Final = 30.0
"""Deadline of one page."""
_WRITE_S: Final = 10.0
"""Deadline of one event: a viewer that does not read loses its stream, and its browser opens another one."""
_KEEP_ALIVE_S: Final = 15.0
_MAX_STREAMS: Final = 256
_CONTENT_TYPES: Final = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_STATIC_S: Final = 3600

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Page = Callable[[Dashboard, web.Request], Awaitable[web.StreamResponse]]

_RUN: Final = "/runs/{run}"
_PAGES: Final[dict[str, Page]] = {
    "/": runs_page,
    "/compare": comparison_page,
    "/compare/charts.json": comparison_json,
    _RUN: run_page,
    f"{_RUN}/charts.json": charts_json,
    f"{_RUN}/groups": groups_page,
    f"{_RUN}/group": group_page,
    f"{_RUN}/group/messages": messages_fragment,
    f"{_RUN}/group/message": message_fragment,
    f"{_RUN}/group/snapshot": snapshot_fragment,
    f"{_RUN}/group/tokens": tokens_fragment,
    f"{_RUN}/evaluations": evaluations_page,
    f"{_RUN}/in-flight": in_flight_page,
    f"{_RUN}/workers": workers_page,
    f"{_RUN}/sandboxes": sandboxes_page,
    f"{_RUN}/engines": engines_fragment,
    f"{_RUN}/timeline": timeline_page,
    f"{_RUN}/dead": dead_letters_page,
    f"{_RUN}/dead/letter": dead_letter_page,
    f"{_RUN}/logs": logs_page,
    f"{_RUN}/settings": settings_page,
}
_CHANGES: Final[dict[str, Page]] = {f"{_RUN}/dead": change_dead_letters}
"""What the pages post; `access_middleware` lets it through only if changes are allowed."""
_PARTS: Final[dict[str, RenderPart]] = {
    "state": render_state,
    "pipeline": render_pipeline,
    "steps": render_steps,
    "in_flight": render_in_flight,
    "workers": render_workers,
    "sandboxes": render_sandboxes,
}


@asynccontextmanager
async def serve_dashboard(runs: Runs, access: Access, port: int) -> AsyncIterator[str]:
    """Serve the pages until the context is left.

    Args:
        runs: the runs.
        access: where to listen, and who may do what.
        port: 0 for a free one.

    Yields:
        The URL.

    Raises:
        SettingsError: other machines could look, or pages change a run, without a token.
        EngineError: the address is taken, or none of this machine's.
    """
    access.check()
    static = await anyio.to_thread.run_sync(_read_static)
    async with anyio.create_task_group() as tasks:
        dashboard = Dashboard(runs, access, _PARTS, tasks)
        async with listen(_application(dashboard, static), access.host, port, rules=access.rules) as url:
            yield url
        tasks.cancel_scope.cancel()


def _application(dashboard: Dashboard, static: dict[str, bytes]) -> web.Application:
    app = web.Application(middlewares=[_Templates().load, access_middleware(dashboard.access), _error_pages])
    app.on_response_prepare.append(add_headers)
    app.router.add_get("/static/{name}", partial(_static_file, static))
    app.router.add_get("/health", _answer_health)
    app.router.add_get(f"{_RUN}/events", partial(_Streams(dashboard).send, dashboard))
    for path, page in _PAGES.items():
        app.router.add_get(path, partial(page, dashboard))
    for path, page in _CHANGES.items():
        app.router.add_post(path, partial(page, dashboard))
    return app


class _Templates:
    """Compiles the templates at the first request: many dashboards that `penstock run` starts get none."""

    def __init__(self) -> None:
        self._lock = anyio.Lock()
        self._are_loaded = False

    @web.middleware
    async def load(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request once the templates are there."""
        if not self._are_loaded:
            async with self._lock:
                await anyio.to_thread.run_sync(load_templates)
                self._are_loaded = True
        return await handler(request)


class _Streams:
    """The open streams of events, which are limited in number."""

    def __init__(self, dashboard: Dashboard) -> None:
        self._dashboard = dashboard
        self._open = 0

    async def send(self, dashboard: Dashboard, request: web.Request) -> web.StreamResponse:
        """Send the parts of a page, and each again whenever it changes, as server-sent events."""
        run = await dashboard.run(request)
        names = request.query.get("parts", "").split(",")
        parts = tuple(name for name in dict.fromkeys(names) if name in dashboard.parts)
        if self._open >= _MAX_STREAMS:
            raise web.HTTPServiceUnavailable(text=f"{_MAX_STREAMS} pages are open already. Close some.")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
        self._open += 1
        try:
            await response.prepare(request)
            await self._write(response, run, parts)
        except (ConnectionError, TimeoutError) as error:
            log.debug("stream.ended", why=str(error))
        finally:
            self._open -= 1
        return response

    async def _write(self, response: web.StreamResponse, run: Run, parts: Sequence[str]) -> None:
        sent: dict[str, str] = {}
        written_at = 0.0
        async for frame in self._dashboard.view(run).frames(tuple(parts)):
            changed = [name for name in parts if sent.get(name) != frame.parts[name]]
            sent = frame.parts
            if not changed and time.monotonic() - written_at < _KEEP_ALIVE_S:
                continue
            written_at = time.monotonic()
            text = "".join(_event(name, sent[name]) for name in changed) or ":\n\n"
            with anyio.fail_after(_WRITE_S):
                await response.write(text.encode())


def _event(name: str, text: str) -> str:
    lines = "".join(f"data: {line}\n" for line in text.splitlines()) or "data:\n"
    return f"event: {name}\n{lines}\n"


@web.middleware
async def _error_pages(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Show an error as a page; an event stream has no deadline, a page has one."""
    try:
        if request.path.endswith("/events"):
            return await handler(request)
        with anyio.fail_after(_PAGE_S):
            return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return error_page(error.status, error.reason, error.text or "")
    except PenstockError as error:
        return error_page(503, "This page cannot be shown now", str(error))
    except TimeoutError:
        return error_page(
            503, "This page took too long", f"It was not ready within {_PAGE_S:g} s. Try a narrower filter."
        )
    except Exception as error:  # noqa: BLE001  (a page that fails says so, and the others go on)
        await log_page_failure(error, request.path)
        text = f"{describe_exception(error)}. The dashboard's log has the traceback."
        return error_page(500, "This page cannot be shown", text)


async def _static_file(static: dict[str, bytes], request: web.Request) -> web.StreamResponse:
    """Send a script, style or picture of the pages."""
    name = request.match_info["name"]
    if name not in static:
        raise web.HTTPNotFound(text="There is no such file.")
    kind = _CONTENT_TYPES.get(name.rpartition(".")[2], "text/plain")
    headers = {"Cache-Control": f"public, max-age={_STATIC_S}"}
    return web.Response(body=static[name], content_type=kind, charset="utf-8", headers=headers)


async def _answer_health(_: web.Request) -> web.StreamResponse:
    """Answer 200, without a token."""
    return web.Response(text="ok\n")


def _read_static() -> dict[str, bytes]:
    folder = importlib.resources.files("workers.dashboard") / "static"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def run_dashboard(targets: Sequence[str], redis: str, access: Access, port: int) -> None:
    """Serve the pages of some runs, or of all below `runs/`, until SIGINT or SIGTERM.

    An address that other machines reach, and changes, need a token: a random one is made if there is none, and printed
    in the address.

    Raises:
        PenstockError: a target is no run, or the address cannot be used.
    """
    shown = ""
    if not access.token and (access.allow_changes or not is_loopback(access.host)):
        access = msgspec.structs.replace(access, token=secrets.token_urlsafe(16))
        shown = f"/?token={access.token}"
    runs = Runs(targets, redis)

    async def serve() -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async with serve_dashboard(runs, access, port) as url:
                print(f"listening on {url}{shown}", flush=True)  # noqa: T201  (this is the command's output)
                async for _ in signals:
                    return

    anyio.run(serve)
