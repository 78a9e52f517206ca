"""`/metrics` of the supervisor of `penstock run`, and the list of the run's other processes for Prometheus."""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from urllib.parse import urlsplit

import anyio.to_thread

from workers.run.child_processes import ChildProcesses
from workers.run.role_specs import ENGINE
from workers.runtime import metrics
from workers.runtime.health import RoleHealth
from workers.runtime.metrics_server import serve_metrics
from workers.settings import Settings


@asynccontextmanager
async def serve_supervisor_metrics(
    settings: Settings,
    children: ChildProcesses,
    find_problem: Callable[[], str],
    list_engines: Callable[[], Sequence[str]],
) -> AsyncIterator[None]:
    """Serve until the context is left, if the run has an address for metrics.

    Args:
        settings: of the run.
        children: the processes that the supervisor has started.
        find_problem: returns why the run is not ready; empty if all roles were started. Called in a thread.
        list_engines: returns the URLs of the run's engines. Called in a thread.
    """
    address = settings.run.metrics_address
    health = RoleHealth(settings.queue.lease_s)
    health.ready_when(find_problem)

    def list_targets() -> Iterator[tuple[str, str]]:
        yield "supervisor", address
        for spec in children.running_specs():
            if spec.metrics_address:
                yield spec.role, spec.metrics_address
        for url in list_engines():
            if url.startswith("http"):
                yield ENGINE, urlsplit(url).netloc

    for role in ("feed", "rollout", "score", "train", ENGINE):
        metrics.processes.labels(role).set_function(partial(children.count_running, role))
    ours = await anyio.to_thread.run_sync(version, "penstock")  # reads files
    info = {"role": "supervisor", "run": settings.run.name, "version": ours}
    registries = metrics.REGISTRIES["supervisor"]
    async with serve_metrics(address, registries, health, info, list_targets=list_targets):
        yield
