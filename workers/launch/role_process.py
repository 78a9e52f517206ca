"""The process of one role: settings, connection, drain, recycling."""

import faulthandler
import os
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from pathlib import Path
from pkgutil import resolve_name

import anyio
import msgspec
import structlog

from stream.connection.run_connection import connect
from stream.disk_space import limit_waits
from stream.errors import PenstockError, SettingsError
from stream.parent_death import die_with_parent
from workers.datasets.environment_rows import temporary_folder
from workers.launch.process import limit_drain, report_error, run_to_exit_code, watch_signals
from workers.role.context import RoleMain, WorkerContext
from workers.role.exit_codes import ExitCode
from workers.role.log_setup import configure_logging, drop_output_when_full
from workers.role.memory_watch import WATCHED, MemoryReports
from workers.role.watchdogs import HangGuard, LoopWatchdog, WorkerRecycler
from workers.runs.folder import lock_folder
from workers.runs.identity import join_run
from workers.settings import Settings
from workers.settings.secrets import REDIS, read_secret
from workers.settings.toml_file import display_source, load_settings
from workers.train.checkpointing.object_store import find_copy, restore

log = structlog.get_logger()

ROLE_MAINS: dict[str, Callable[[], RoleMain]] = {
    "feed": partial(resolve_name, "workers.feed.worker:feed"),
    "rollout": partial(resolve_name, "workers.rollout.worker:rollout"),
    "score": partial(resolve_name, "workers.score.worker:score"),
    "train": partial(resolve_name, "workers.train.worker:train"),
    "train as rank 0": partial(resolve_name, "workers.train.rank_control.rank0:train_as_rank0"),
}
"""Return a role's coroutine function, and import that role alone. Tests and benchmarks put their own functions here."""
_SWITCH_INTERVAL_S = 0.0005
"""How long a thread may keep the interpreter while another one waits for it. Environments and reward functions compute
in many threads at a time; with Python's 5 ms the event loop waits for its turn too long to renew leases."""


def run_role(
    role: str,
    file: Path | str,
    overrides: tuple[str, ...],
    redis: str,
    engines: tuple[str, ...],
    main: str = "",
) -> ExitCode:
    """Run one role until its work is done or it is stopped. Returns the exit code.

    Args:
        role: `feed`, `rollout`, `score` or `train`.
        file: settings file, or its URL.
        overrides: values of single settings, as `--set` takes them; they take precedence over the file.
        redis: URL of the Redis server; default: `run.redis` of the settings.
        engines: URLs of engines; default: `engine.urls` of the settings.
        main: its key in `ROLE_MAINS`; default: `role`.

    Raises:
        KeyError: there is no such role.
    """
    drop_output_when_full()
    configure_logging(role)
    try:
        settings, url = _load_for_role(role, file, overrides, redis)
        if role == "train" and (copy := find_copy(settings)) is not None:
            with lock_folder(settings.folder):
                url = restore(copy, settings)
            log.warning("run.restored", url=url, step=copy.step)
        role_main = ROLE_MAINS[main or role]()
    except SettingsError as error:
        return report_error(error, ExitCode.USAGE)
    except PenstockError as error:
        return report_error(error)
    if engines:
        settings = msgspec.structs.replace(settings, engine=msgspec.structs.replace(settings.engine, urls=engines))
    if role in ("rollout", "score"):
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
    faulthandler.enable(2, all_threads=False)  # user code may crash in C; the supervisor reads where
    has_folder = os.path.isdir(settings.folder)  # noqa: PTH112  (`Path.is_dir` raises where a parent is not ours to read)
    with temporary_folder(settings) if role == "feed" and not has_folder else nullcontext(settings) as its:
        return run_to_exit_code(partial(_run_connected, role, its, url, role_main, has_folder=has_folder))


def run_trainer(
    file: Path | str,
    overrides: tuple[str, ...],
    redis: str,
    engines: tuple[str, ...],
    command: Sequence[str],
) -> int:
    """Run the trainer, or one of its ranks. Returns the exit code.

    With `train.ranks` above 1 this process starts the ranks and waits for them. A process started by `torchrun` is the
    rank in its environment: rank 0 is the trainer, the others execute its commands.

    Args:
        file: settings file, or its URL.
        overrides: values of single settings; they take precedence over the file.
        redis: URL of the Redis server; default: `run.redis` of the settings.
        engines: URLs of engines; default: `engine.urls` of the settings.
        command: command line that starts each rank.
    """
    configure_logging("train")
    from workers.train.ranks import collective_timeout_s, rank_and_world_size

    rank, world_size = rank_and_world_size()
    if world_size > 1:
        die_with_parent(os.getppid())  # torchrun starts each rank in its own session, out of reach of our signals
        if rank:
            from workers.train.rank_control.rank0 import run_follower

            return run_follower()
        return run_role("train", file, overrides, redis, engines, main="train as rank 0")
    try:
        ranks = load_settings(file, overrides).train.ranks
        collective_timeout_s()  # report an invalid value once, not in every rank
    except PenstockError as error:
        return report_error(error, ExitCode.USAGE)
    if ranks == 1 or "RANK" in os.environ:
        return run_role("train", file, overrides, redis, engines)
    from workers.train.rank_control.launcher import launch_ranks

    return launch_ranks(ranks, command)


def _load_for_role(role: str, file: Path | str, overrides: tuple[str, ...], redis: str) -> tuple[Settings, str]:
    """Return the settings, and the URL of the Redis server.

    Raises:
        SettingsError: the settings are invalid, or they name no run, or neither they nor `redis` name a server.
    """
    settings, file = load_settings(file, overrides), display_source(file)
    if not settings.run.name:
        raise SettingsError(f"{file}: run.name is empty: the roles of a run find each other by its name; set it")
    url = redis or settings.run.redis or read_secret(REDIS)
    if not url:
        raise SettingsError(
            f"{file}: run.redis is empty, and neither --redis nor {REDIS} was given: `penstock {role}` needs a server"
        )
    return settings, url


async def _run_connected(name: str, settings: Settings, url: str, main: RoleMain, *, has_folder: bool) -> ExitCode:
    consumer = f"{name}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    queue = settings.queue
    structlog.contextvars.bind_contextvars(run=settings.run.name)
    limit_waits(settings.abort.stall_timeout_s)
    data = settings.folder / "redis" if url.startswith("unix:") and not settings.run.redis else None
    async with connect(url, settings.run.name, reconnect_s=queue.reconnect_timeout_s, server_data=data) as connection:
        settings = await join_run(connection, settings, name)
        stopping = connection.stopping
        context = WorkerContext(
            settings=settings,
            connection=connection,
            consumer=consumer,
            stopping=stopping,
            has_folder=has_folder,
        )
        recycler = WorkerRecycler(queue, stopping)
        guard = HangGuard(settings.hang_timeout_s)
        async with _serve_metrics(name, context), anyio.create_task_group() as tasks:
            tasks.start_soon(recycler.watch)
            tasks.start_soon(guard.watch)
            if not os.environ.get(WATCHED):
                tasks.start_soon(MemoryReports(consumer, lambda: {consumer: os.getpid()}).run, connection)
            tasks.start_soon(LoopWatchdog(queue.lease_s / 3).watch)
            tasks.start_soon(watch_signals, stopping, tasks.cancel_scope)
            tasks.start_soon(limit_drain, stopping, queue.shutdown_timeout_s, tasks.cancel_scope)
            log.info("role.started", consumer=consumer)
            await main(context)
            log.info("role.ended", drained=stopping.is_set())
            tasks.cancel_scope.cancel()
    if recycler.reason:
        print(f"asks for a restart: {recycler.reason}", file=sys.stderr, flush=True)  # noqa: T201
        return ExitCode.RECYCLE
    return ExitCode.SUCCESS


def _serve_metrics(role: str, context: WorkerContext) -> AbstractAsyncContextManager[str]:
    """Serve `/metrics`, `/health` and `/ready` if the run has an address for them."""
    if not context.settings.run.metrics_address:
        return nullcontext("")
    from workers.role.metrics_server import serve_metrics

    return serve_metrics(role, context.settings, context.readiness, context.connection)
