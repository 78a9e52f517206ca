"""The process of one role: settings, connection, signals, drain, exit code (`ExitCode`)."""

import os
import secrets
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import anyio
import msgspec
import structlog

from stream import parent_death
from stream.connection.run_connection import connect
from stream.errors import (
    DataError,
    FencedError,
    PenstockError,
    ReferenceNotFoundError,
    RunFailedError,
    RunMismatchError,
    SettingsError,
)
from workers.local_engine.choice import choose_server
from workers.runtime import log_setup as logs
from workers.runtime.context import RoleMain, WorkerContext
from workers.runtime.exit_codes import ExitCode
from workers.runtime.loop_watchdog import LoopWatchdog
from workers.runtime.recycling import WorkerRecycler
from workers.settings import Settings
from workers.settings.toml_file import load_settings

log = structlog.get_logger()

_PERMANENT_ERRORS = (SettingsError, ReferenceNotFoundError, RunMismatchError, DataError, FencedError, RunFailedError)


T = TypeVar("T")


def run_role(
    role: str,
    file: Path,
    overrides: tuple[str, ...],
    redis: str,
    engines: tuple[str, ...],
    role_main: RoleMain | None = None,
) -> int:
    """Run one role until its work is done. Returns the exit code.

    Args:
        role: name of the role.
        file: the settings file.
        overrides: overridden settings, as for `--set`.
        redis: URL of the server; empty: `run.redis`.
        engines: URLs of engines; empty: `engine.urls`.
        role_main: the role's coroutine function; default: the one of that name.
    """
    logs.configure_logging(role)
    try:
        settings, url = _load_for_role(role, file, overrides, redis)
        role_main = role_main or _role_main(role)
    except SettingsError as error:
        return _report_error(error, ExitCode.USAGE)
    if engines:
        settings = msgspec.structs.replace(settings, engine=msgspec.structs.replace(settings.engine, urls=engines))
    return _run(partial(_run_connected, role, settings, url, role_main))


def _load_for_role(role: str, file: Path, overrides: tuple[str, ...], redis: str) -> tuple[Settings, str]:
    """Return the settings, and the URL of the server.

    Raises:
        SettingsError: the settings are wrong, or no server is named.
    """
    settings = load_settings(file, overrides)
    url = redis or settings.run.redis
    if not url:
        raise SettingsError(f"{file}: run.redis is empty and no --redis was given: `penstock {role}` needs a server")
    return settings, url


def run_trainer(
    file: Path, overrides: tuple[str, ...], redis: str, engines: tuple[str, ...], command: Sequence[str]
) -> int:
    """Run the trainer: by itself, or with other ranks. Returns the exit code.

    With `train.ranks` above 1 this process starts so many, and waits for them. One that `torchrun` started is the rank
    that it says: the first is the trainer, the others follow it.

    Args:
        file: the settings.
        overrides: of single settings, as `--set` takes them.
        redis: URL of the server; `run.redis` unless given.
        engines: URLs; `engine.urls` unless given.
        command: that starts this very process, for the ranks to be started by.
    """
    logs.configure_logging("train")
    from workers.train.distributed.ranks import collective_timeout_s, rank_and_world_size

    rank, size = rank_and_world_size()
    if size > 1:
        parent_death.die_with_parent(
            os.getppid()
        )  # torchrun gives each rank a session of its own, which nobody else would end
        if rank:
            from workers.train.rank_control.follower import run_follower

            return run_follower()
        from workers.train.rank_control.rank0 import train_as_rank0

        return run_role("train", file, overrides, redis, engines, train_as_rank0)
    try:
        ranks = load_settings(file, overrides).train.ranks
        collective_timeout_s()  # report an invalid value here once, not in every rank
    except PenstockError as error:
        return _report_error(error, ExitCode.USAGE)
    if ranks == 1 or "RANK" in os.environ:
        return run_role("train", file, overrides, redis, engines)
    from workers.train.rank_control.launcher import launch_ranks

    return launch_ranks(ranks, command)


def run_engine(
    target: Path,
    host: str,
    port: int,
    overrides: tuple[str, ...],
    runner: Literal["auto", "generate", "pooling"] = "auto",
    dtype: str = "",
) -> int:
    """Serve the model of a settings file, or of a model folder, on the engine of its settings. Returns the exit code.

    Args:
        target: the file, or the folder.
        host: address to listen on.
        port: 0 for a free one.
        overrides: of single settings, the file's or the defaults'.
        runner: what is served of the model: tokens (`generate`), or the scores of a sequence classifier (`pooling`);
            `auto`: what its configuration says it is for.
        dtype: of the weights; the file's `model.dtype`, or `float32`, unless given.
    """
    logs.configure_logging("serve")
    try:
        serve = choose_server(target, overrides, runner, dtype)
    except SettingsError as error:
        return _report_error(error, ExitCode.USAGE)

    async def main() -> int:
        stopping = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_watch_signals, stopping, tasks.cancel_scope)
            tasks.start_soon(_limit_drain, stopping, 0.0, tasks.cancel_scope)
            await serve(
                host=host,
                port=port,
                ready=lambda url: print(f"listening on {url}", flush=True),  # noqa: T201  (the supervisor reads it)
            )
            tasks.cancel_scope.cancel()
        return ExitCode.SUCCESS

    return _run(main)


def run_async(main: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine function on uvloop where it is installed."""
    return anyio.run(main, backend_options={"use_uvloop": _has_uvloop()})


def _run(main: Callable[[], Awaitable[int]]) -> int:
    """Run a coroutine function to its end. An expected error becomes one line and an exit code."""
    try:
        return run_async(main)
    except BaseExceptionGroup as group:
        error = _find_penstock_error(group)
        if error is None:
            raise
        return _report_error(error)
    except PenstockError as error:
        return _report_error(error)


def _find_penstock_error(group: BaseExceptionGroup[BaseException]) -> PenstockError | None:
    """The error of ours that ended a task group, if that is what did."""
    for error in group.exceptions:
        found = _find_penstock_error(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(found, PenstockError):
            return found
    return None


def _report_error(error: PenstockError, code: ExitCode | None = None) -> int:
    """Log and print an error. Returns the code; by default the one of the error's class."""
    log.error("role.failed", kind=type(error).__name__, error=str(error))
    print(f"error: {error}", file=sys.stderr, flush=True)  # noqa: T201  (the supervisor quotes this line)
    default = ExitCode.PERMANENT if isinstance(error, _PERMANENT_ERRORS) else ExitCode.FAILURE
    return default if code is None else code


async def _run_connected(name: str, settings: Settings, url: str, main: RoleMain) -> int:
    consumer = f"{name}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    queue = settings.queue
    async with connect(url, settings.run.name, reconnect_s=queue.reconnect_timeout_s) as connection:
        role = WorkerContext(settings=settings, connection=connection, consumer=consumer, stopping=connection.stopping)
        wear = WorkerRecycler(queue, role.stopping)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wear.watch)
            tasks.start_soon(LoopWatchdog(queue.lease_s / 3).watch)
            tasks.start_soon(_watch_signals, role.stopping, tasks.cancel_scope)
            tasks.start_soon(_limit_drain, role.stopping, queue.shutdown_timeout_s, tasks.cancel_scope)
            log.info("role.started", consumer=consumer)
            await main(role)
            log.info("role.ended", drained=role.stopping.is_set())
            tasks.cancel_scope.cancel()
    if wear.reason:
        print(f"asks for a restart: {wear.reason}", file=sys.stderr, flush=True)  # noqa: T201
        return ExitCode.RECYCLE
    return ExitCode.SUCCESS


async def _watch_signals(stopping: anyio.Event, scope: anyio.CancelScope) -> None:
    """The first signal asks for a drain; a second one ends it."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        asked = False
        async for received in signals:
            if asked:
                scope.cancel()
                return
            asked = True
            log.info("drain.started", signal=received.name)
            stopping.set()


async def _limit_drain(stopping: anyio.Event, grace_s: float, scope: anyio.CancelScope) -> None:
    """A drain, whoever asked for it, ends with the grace time."""
    await stopping.wait()
    await anyio.sleep(grace_s)
    scope.cancel()


def _role_main(role: str) -> RoleMain:
    """The role's coroutine; imported here, so that a role loads only what it needs."""
    match role:
        case "feed":
            from workers.feed.worker import feed

            return feed
        case "rollout":
            from workers.rollout.worker import rollout

            return rollout
        case "score":
            from workers.score.worker import score

            return score
        case "train":
            from workers.train.worker import train

            return train
        case _:
            raise SettingsError(f"no role is called {role!r}; there are feed, rollout, score, train and serve")


def _has_uvloop() -> bool:
    from importlib.util import find_spec

    return find_spec("uvloop") is not None
