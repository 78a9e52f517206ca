"""Every HTTP server of a run, started for a test, with its routes as aiohttp's router knows them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from aiohttp import web

from examples.reward_model.make_models import make_reward_model
from stream.operator.status import read_status
from tests.cases.models import write_small_qwen3
from tests.cases.run_folders import write_run
from tests.unit.test_episode import Scripted
from tests.unit.test_recorder import recorder_of
from workers.dashboard.access import Access
from workers.dashboard.app import serve_dashboard
from workers.local_engine.local_server import EngineLimits, serve_local_engine
from workers.local_engine.pooling.pooling_server import serve_pooling
from workers.role.context import Readiness
from workers.role.metrics_server import serve_metrics
from workers.rollout.agent_endpoint.endpoint import serve_endpoint
from workers.runs.catalog import Runs
from workers.settings import Settings
from workers.settings.toml_file import parse_settings
from workers.train.publishing.http_transfer import serve_weights

TOKEN = "the token of the dashboard"

SERVERS = {
    "local engine": "workers/local_engine/local_server.py",
    "reward model": "workers/local_engine/pooling/pooling_server.py",
    "agent endpoint": "workers/rollout/agent_endpoint/endpoint.py",
    "weights": "workers/train/publishing/http_transfer.py",
    "dashboard": "workers/dashboard/app.py",
    "dashboard with a token": "workers/dashboard/app.py",
    "metrics": "workers/role/metrics_server.py",
}
"""The servers, and the file that starts each of them."""


@dataclass
class Served:
    """A server that listens, and what a client that belongs to the run knows about it."""

    url: str
    values: dict[str, str] = field(default_factory=dict)
    """What the names in its routes stand for."""
    headers: dict[str, str] = field(default_factory=dict)
    """What a legitimate request has to bring."""
    posts_forms: bool = False
    read_state: Callable[[], Awaitable[object]] = lambda: asyncio.sleep(0)
    """Returns what requests could change."""


class Watched:
    """Notes the applications that are served meanwhile, and each request that reaches one of their handlers."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.applications: list[web.Application] = []
        self.handled: list[tuple[str, str]] = []
        watched = self

        class Runner(web.AppRunner):
            def __init__(self, app: web.Application, **options: Any) -> None:
                super().__init__(app, **options)
                app.middlewares.append(watched.note)
                watched.applications.append(app)

        patch.setattr(web, "AppRunner", Runner)

    @web.middleware
    async def note(self, request: web.Request, handler) -> web.StreamResponse:
        """Run as the innermost middleware."""
        route = request.match_info.route
        if route.resource is not None:
            self.handled.append((request.method, route.resource.canonical))
        return await handler(request)

    def routes(self) -> list[tuple[str, str]]:
        """Return method and path of every route of the application that was served last."""
        return [(route.method, route.resource.canonical) for route in self.applications[-1].router.routes()]


@asynccontextmanager
async def served(name: str, folder: Path, pipe: Any, redis_url: str) -> AsyncIterator[Served]:
    """Start a server.

    Args:
        name: of `SERVERS`.
        folder: an empty one.
        pipe: of the run that a dashboard shows.
        redis_url: of that run.
    """
    start = {
        "local engine": partial(_local_engine, folder),
        "reward model": partial(_reward_model, folder),
        "agent endpoint": _agent_endpoint,
        "weights": partial(_weights, folder),
        "dashboard": partial(_dashboard, Access(), folder, pipe, redis_url),
        "dashboard with a token": partial(_dashboard, Access(token=TOKEN, allow_changes=True), folder, pipe, redis_url),
        "metrics": _metrics,
    }[name]
    async with start() as result:
        yield result


@asynccontextmanager
async def _listening(serve: Callable[..., Awaitable[None]]) -> AsyncIterator[str]:
    """Run a server that announces its URL; yields it."""
    urls: list[str] = []
    is_ready = anyio.Event()

    def ready(url: str) -> None:
        urls.append(url)
        is_ready.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(serve, port=0, threads=1, dtype="float32", ready=ready))
        with anyio.fail_after(60):
            await is_ready.wait()
        yield urls[0]
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def _local_engine(folder: Path) -> AsyncIterator[Served]:
    model = await anyio.to_thread.run_sync(partial(write_small_qwen3, folder, 32, layers=1, tied=True))
    async with _listening(partial(serve_local_engine, model, limits=EngineLimits(4, 64))) as url:

        async def read_state() -> object:
            import aiohttp

            async with aiohttp.ClientSession(url) as session:
                answers = [await (await session.get(path)).json() for path in ("/is_paused", "/weight_info")]
                lines = (await (await session.get("/metrics")).text()).splitlines()
            return answers, [line for line in lines if "_tokens_total " in line]

        yield Served(url, read_state=read_state)


@asynccontextmanager
async def _reward_model(folder: Path) -> AsyncIterator[Served]:
    await anyio.to_thread.run_sync(partial(make_reward_model, folder, seed=2))
    async with _listening(partial(serve_pooling, folder, max_length=0)) as url:
        yield Served(url)


@asynccontextmanager
async def _agent_endpoint() -> AsyncIterator[Served]:
    recorder, completion = recorder_of(Scripted(["one"] * 1000))

    async def read_state() -> object:
        return completion.turns

    async with serve_endpoint("127.0.0.1") as endpoint, endpoint.episode(recorder) as url:
        secret = url.removeprefix(endpoint.url).split("/")[1]
        yield Served(endpoint.url, {"key": secret}, read_state=read_state)


@asynccontextmanager
async def _weights(folder: Path) -> AsyncIterator[Served]:
    (folder / "model.safetensors").write_bytes(b"weights")
    async with serve_weights("127.0.0.1", 0) as transfer:
        await transfer.prepare(folder)
        offered = transfer.server.find(folder)
        assert offered is not None
        _, secret, offer, _ = offered.url_path.split("/")
        yield Served(transfer.base_url, {"secret": secret, "offer": offer, "file": "model.safetensors"})


@asynccontextmanager
async def _dashboard(access: Access, folder: Path, pipe: Any, redis_url: str) -> AsyncIterator[Served]:
    """Serve the dashboard of a run that has a dead letter."""
    write_run(folder, pipe.connection.run, redis=redis_url)
    await pipe.feed("dies")
    (lease,) = (await pipe.stage("prompts", "rollout-1", data_attempts=1).claim(1)).leases
    await pipe.stage("prompts", "rollout-1", data_attempts=1).release(lease, "data", "no image")

    async def read_state() -> object:
        return (await read_status(pipe.connection)).dead

    catalog = await anyio.to_thread.run_sync(Runs, [str(folder)])
    async with serve_dashboard(catalog, access, 0) as url:
        headers = {"Authorization": f"Bearer {access.token}", "Origin": url} if access.token else {}
        values = {"run": folder.name, "name": "dashboard.js"}
        yield Served(url, values, headers, posts_forms=True, read_state=read_state)


@asynccontextmanager
async def _metrics() -> AsyncIterator[Served]:
    readiness = Readiness()
    readiness.mark_ready()
    async with serve_metrics("supervisor", settings_with_metrics("127.0.0.1:0"), readiness) as url:
        yield Served(url)


def settings_with_metrics(address: str) -> Settings:
    """Return the settings of a run whose processes serve metrics there."""
    run = {"name": "r", "metrics_address": address}
    return parse_settings(
        {"run": run, "model": {"path": "m"}, "data": {"path": "p.jsonl"}, "rewards": [{"ref": "math"}]}
    )
