"""Find a run and connect to its server. `live.json` in its folder names the server of a running run."""

import os
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec import Struct

from stream.connection.url import has_secret
from stream.durable import write_file_atomically
from stream.errors import PenstockError, RunMismatchError, ServerError
from stream.operator.run_status import RunStatus, read_status, read_status_once
from workers.run.run_folder import RUNS, disk_problems, find_newest_run, lock_folder
from workers.settings import Settings
from workers.settings.pipeline import name_from
from workers.settings.secrets import REDIS, read_secret
from workers.settings.toml_file import load_settings

if TYPE_CHECKING:  # a command that reads one status does not load a Redis client
    from stream.connection.run_connection import RunConnection

_RECONNECT_S = 10.0

T = TypeVar("T")


class RunInfo(Struct, kw_only=True):
    """Content of `live.json`: a running run."""

    run: str
    redis: str
    engines: tuple[str, ...] = ()
    pid: int
    """Process id of the supervisor."""
    host: str = ""
    """Host of the supervisor; empty: this one."""
    process_start: str = ""
    """When the supervisor started (`process_start`): another process may have got its id since."""

    @classmethod
    def of_this_process(cls, run: str, redis: str, engines: tuple[str, ...] = ()) -> "RunInfo":
        """Return the information about a run whose supervisor is this process."""
        start = process_start(os.getpid())
        return cls(
            run=run, redis=redis, engines=engines, pid=os.getpid(), host=socket.gethostname(), process_start=start
        )

    @property
    def is_running(self) -> bool:
        """Whether the supervisor is running; a supervisor on another host is taken for running."""
        if self.host not in {"", socket.gethostname()}:
            return True
        start = process_start(self.pid)
        return bool(start) and self.process_start in {"", start}


class RunLocation(Struct, frozen=True, kw_only=True):
    """A run's server and folder."""

    run: str
    url: str = ""
    """URL of the Redis server; empty: the run's private server is stopped, and its data are in `folder`."""
    folder: Path | None = None
    fsync: str = "everysec"
    settings: Settings | None = None
    """None if only the server's URL is known."""


def process_start(pid: int) -> str:
    """Return a text that no other process has that gets this id: boot and start time. Empty: there is no process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{fields[19]}"
    except (FileNotFoundError, ProcessLookupError):
        if sys.platform == "linux":
            return ""
    import psutil  # only here: Linux does without it

    try:
        return str(psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return ""


def write_run_info(folder: Path, info: RunInfo) -> None:
    """Write `live.json`; only its owner can read it if the server's URL contains a password."""
    payload = msgspec.json.format(msgspec.json.encode(info)) + b"\n"
    write_file_atomically(folder / "live.json", payload, private=has_secret(info.redis))


def remove_run_info(folder: Path) -> None:
    """Remove `live.json`, because the run is no longer running."""
    (folder / "live.json").unlink(missing_ok=True)


def read_run_info(folder: Path) -> RunInfo | None:
    """Return the content of `live.json`; None if there is no such file, or its supervisor has exited.

    Raises:
        PenstockError: the file is damaged, or belongs to another user.
    """
    try:
        live = msgspec.json.decode((folder / "live.json").read_bytes(), type=RunInfo)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as error:
        raise PenstockError(
            f"{folder / 'live.json'} is for another user to read; name the server with --redis"
        ) from error
    except ValueError as error:
        raise PenstockError(f"{folder / 'live.json'} is broken: {error}; remove it if nothing runs there") from error
    return live if live.is_running else None


def find_run(target: str | None, redis: str = "", *, must_have_begun: bool = True) -> RunLocation:
    """Find a run.

    Args:
        target: folder, settings file or name of the run; None: the only running run under `runs/`, or else, for
            commands that read a run's folder, the newest one.
        redis: URL of the run's server; takes precedence over the run's files. Empty: use these.
        must_have_begun: refuse a run that has neither a server nor server data.

    Raises:
        PenstockError: there is no such run, it has not begun, or several runs are running and `target` is None.
    """
    file = _default_run(or_newest=not must_have_begun) if target is None else find_settings_file(target)
    if file is None:
        from_environment = must_have_begun and not Path(str(target)).exists()
        if url := redis or (read_secret(REDIS) if from_environment else ""):
            return RunLocation(run=str(target), url=url)
        raise PenstockError(_explain_unknown(str(target)))
    settings = load_settings(file)
    if not settings.run.name:
        file = _newest_run(file)
        settings = load_settings(file)
        folder = file.parent
    else:
        folder = settings.folder if target and Path(target).is_file() else file.parent
    live = read_run_info(folder)
    has_private_server = (folder / "redis").is_dir()
    url = redis or (live.redis if live else settings.run.redis) or ("" if has_private_server else read_secret(REDIS))
    if must_have_begun and not url and not has_private_server:
        raise PenstockError(f"the run in {folder} has not begun: there is no server, and no server's data")
    return RunLocation(run=settings.run.name, url=url, folder=folder, fsync=settings.queue.fsync, settings=settings)


def read_run_status(location: RunLocation) -> RunStatus:
    """Return the status of a run, with the reports of workers.

    Raises:
        PenstockError: the server does not answer, or has no such run.
    """
    try:
        found = read_status_once(location.url, location.run, with_in_flight=True) if location.url else None
        return found or with_run(location, partial(read_status, with_in_flight=True))
    except ServerError as error:
        if problems := disk_problems(location.folder, None):
            raise ServerError("; ".join([*map(str, problems), str(error)])) from error
        raise


def with_run(location: RunLocation, main: "Callable[[RunConnection], Awaitable[T]]") -> T:
    """Connect to a run without creating keys, and call `main` with the connection.

    If the run's private server is stopped, start it for the duration of the call. The folder's lock prevents a start of
    the run meanwhile.
    """
    import anyio

    from stream.connection.run_connection import connect

    async def there() -> T:
        async with AsyncExitStack() as stack:
            url = location.url
            if not url and location.folder is not None:
                from stream.server_process import private_server  # only here: most runs that are looked at run

                url = await stack.enter_async_context(private_server(location.folder / "redis", fsync=location.fsync))
            connection = await stack.enter_async_context(
                connect(url, location.run, reconnect_s=_RECONNECT_S, create=False)
            )
            with connection.explained_refusals():
                return await main(connection)

    at_rest = location.folder if not location.url else None
    with lock_folder(at_rest) if at_rest else nullcontext():
        return anyio.run(there)


async def refuse_other_run(location: RunLocation, connection: "RunConnection") -> None:
    """Refuse to change a run on the server that is not the one in the folder, though it has its name.

    Raises:
        RunMismatchError: they are two runs.
    """
    import anyio

    from stream.connection.run_identity import read_identity, read_server_identity

    if location.folder is None:
        return
    ours = await anyio.to_thread.run_sync(read_identity, location.folder)
    server = await read_server_identity(connection)
    if ours is not None and server.id and server.id != ours.id:
        raise RunMismatchError(
            f"run {location.run!r} on {connection.display_url} is {server.id[:8]}, and the run in {location.folder} is "
            f"{ours.id[:8]}: nothing was changed; name the server of this one with --redis, or the other run's folder"
        )


def find_run_folder(target: str) -> Path:
    """Return the folder of a run: `target` is its folder, settings file or name.

    Raises:
        PenstockError: there is no such run.
    """
    if Path(target).is_dir():
        return Path(target)
    file = find_settings_file(target)
    if file is None:
        problem = f"{target} is neither a run's folder, nor a settings file, nor a run under {RUNS}/"
        raise PenstockError(explain_missing_file(target) or problem)
    settings = load_settings(file)
    return settings.folder if settings.run.name else _newest_run(file).parent


def explain_missing_file(target: str) -> str:
    """Return what is wrong with a target that is named like a settings file and does not exist; else nothing."""
    if not target.endswith(".toml") or Path(target).exists():
        return ""
    return f"{target}: no such file; the working directory is {Path.cwd()}"


def _explain_unknown(target: str) -> str:
    if problem := explain_missing_file(target):
        return problem
    if (Path(target) / "identity.json").is_file():
        return f"{target} has no run.toml, since its roles were started one by one: give their settings file instead"
    return (
        f"{target} is neither a run's folder, nor a settings file, nor a run under {RUNS}/; with --redis URL or "
        f"{REDIS} it may be the name of a run there"
    )


def _newest_run(file: Path) -> Path:
    """Return the `run.toml` of the newest run of a settings file that names none."""
    if newest := find_newest_run(file):
        return newest
    raise PenstockError(
        f"no run was started from {file} here: it has no run.name, and there is no folder "
        f"{RUNS}/{name_from(file.stem)}-DATE-TIME"
    )


def _default_run(*, or_newest: bool) -> Path:
    """Return the `run.toml` of the only running run under `runs/`; without one, of the newest if that will do."""
    files = sorted(RUNS.glob("*/run.toml"), key=lambda file: file.stat().st_mtime)
    live = [file for file in files if read_run_info(file.parent) is not None]
    if len(live) == 1:
        return live[0]
    if live:
        raise PenstockError(f"{len(live)} runs go on: {', '.join(str(each.parent) for each in live)}; say which one")
    if files and or_newest:
        return files[-1]
    names = f", such as {files[-1].parent}" if files else ""
    raise PenstockError(f"no run is active under {RUNS}/; name a run's folder{names}, or its settings file")


def find_settings_file(target: str) -> Path | None:
    """Return the settings file of a target: a file, a folder with `run.toml`, or a name under `runs/`; else None.

    Raises:
        PenstockError: the name is too long, or a folder on the way to it is not ours to read.
    """
    path = Path(target)
    candidates = (path, path / "run.toml", RUNS / target / "run.toml")
    try:
        return next((file for file in candidates if file.is_file()), None)
    except OSError as error:
        raise PenstockError(
            f"{target}: {error.strerror}; name a run's folder, its settings file, or its name"
        ) from error
