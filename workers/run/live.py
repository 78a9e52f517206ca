"""Finding a run: its folder says where its server is, while it goes on (`live.json`) and after."""

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import msgspec
from msgspec import Struct

from stream.errors import PenstockError
from stream.link import Link, connect
from stream.server import private_server
from workers.run.folder import held, write_whole
from workers.settings import load

_RUNS = Path("runs")
_RECONNECT_S = 10.0


class Live(Struct, kw_only=True):
    """`live.json`: a run that goes on."""

    run: str
    redis: str
    engines: tuple[str, ...] = ()
    pid: int
    """Of the supervisor."""


class Place(Struct, frozen=True, kw_only=True):
    """Where a run can be looked at."""

    run: str
    url: str = ""
    """Empty: its private server is at rest, and its data lie in `folder`."""
    folder: Path | None = None
    fsync: str = "everysec"


def announce(folder: Path, live: Live) -> None:
    """Say that the run goes on."""
    write_whole(folder / "live.json", msgspec.json.format(msgspec.json.encode(live)) + b"\n")


def withdraw(folder: Path) -> None:
    """Say that it does not any more."""
    (folder / "live.json").unlink(missing_ok=True)


def read(folder: Path) -> Live | None:
    """What the folder says of a run that goes on; None where it says nothing, or its supervisor is gone."""
    try:
        live = msgspec.json.decode((folder / "live.json").read_bytes(), type=Live)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except msgspec.DecodeError as error:
        raise PenstockError(f"{folder / 'live.json'} cannot be read: {error}; remove it if nothing runs there") from error
    try:
        os.kill(live.pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return live
    return live


def locate(target: str | None, redis: str = "") -> Place:
    """Find the run that somebody means.

    Args:
        target: its folder, its settings file, or its name; None: the only one that goes on under `runs/`.
        redis: URL of its server, where the folder does not say.

    Raises:
        PenstockError: no such run, or more than one that could be meant.
    """
    folder = _only_live() if target is None else _folder(target, redis)
    if folder is None:
        return Place(run=str(target), url=redis)
    live = read(folder)
    if live is not None:
        return Place(run=live.run, url=redis or live.redis, folder=folder)
    settings = load(folder / "run.toml")
    url = redis or settings.run.redis
    if not url and not (folder / "redis").is_dir():
        raise PenstockError(f"{folder} holds no server's data: this run has not begun")
    return Place(run=settings.run.name, url=url, folder=folder, fsync=settings.delivery.fsync)


@asynccontextmanager
async def open_run(place: Place) -> AsyncIterator[Link]:
    """Connect to the run, creating nothing; a private server that is at rest is woken for as long as this lasts."""
    async with AsyncExitStack() as stack:
        url = place.url
        if not url:
            assert place.folder is not None
            stack.enter_context(await anyio.to_thread.run_sync(_holding, place.folder))
            url = await stack.enter_async_context(private_server(place.folder / "redis", fsync=place.fsync))
        yield await stack.enter_async_context(connect(url, place.run, reconnect_s=_RECONNECT_S, create=False))


def _holding(folder: Path) -> "AsyncExitStack":
    raise NotImplementedError


def _only_live() -> Path:
    live = sorted(path.parent for path in _RUNS.glob("*/live.json") if read(path.parent) is not None)
    if len(live) == 1:
        return live[0]
    if live:
        raise PenstockError(f"{len(live)} runs go on: {', '.join(map(str, live))}; say which one")
    raise PenstockError(f"no run goes on under {_RUNS}/; name a run's folder, or its settings file")


def _folder(target: str, redis: str) -> Path | None:
    """The folder that is meant; None for a bare name on the server that was given."""
    path = Path(target)
    if path.is_file():
        return load(path).folder
    for folder in (path, _RUNS / target):
        if (folder / "run.toml").is_file():
            return folder
    if redis:
        return None
    raise PenstockError(
        f"{target} is no run's folder, no settings file, and no run under {_RUNS}/; with --redis URL it may be a run's name"
    )
