"""Find a run by its folder, its settings file or its name."""

from pathlib import Path
from typing import TYPE_CHECKING

from stream.errors import PenstockError, RunMismatchError
from workers.runs.folder import find_newest_run
from workers.runs.live_run import read_live
from workers.runs.run import NoServerError, Run
from workers.settings.run import name_from
from workers.settings.secrets import REDIS, read_secret
from workers.settings.settings import RUNS
from workers.settings.toml_file import load_settings

if TYPE_CHECKING:  # a command that reads one status does not load a Redis client
    from stream.connection.run_connection import RunConnection


def open_run(target: str | Path | None = None, redis: str = "", *, must_have_begun: bool = False) -> Run:
    """Find a run.

    Args:
        target: folder, settings file or name of the run; None: the only running run under `runs/`, or else, for
            those who read a run's folder, the newest one.
        redis: URL of the run's server; takes precedence over the run's files. Empty: use these.
        must_have_begun: refuse a run that has neither a server nor server data.

    Raises:
        PenstockError: there is no such run, it has not begun, or several runs are running and `target` is None.
    """
    name = None if target is None else str(target)
    file = _default_run(or_newest=not must_have_begun) if name is None else find_settings_file(name)
    if file is None:
        from_environment = must_have_begun and not Path(str(name)).exists()
        if url := redis or (read_secret(REDIS) if from_environment else ""):
            return Run(str(name), redis=url)
        raise PenstockError(_explain_unknown(str(name)))
    settings = load_settings(file)
    if not settings.run.name:
        file = _newest_run(file)
        settings = load_settings(file)
        folder = file.parent
    else:
        folder = settings.folder if name and Path(name).is_file() else file.parent
    run = Run(settings.run.name, folder, redis, file, folder.resolve().name)
    if must_have_begun and not run.url and not run.has_private_server:
        raise NoServerError(f"the run in {folder} has not begun: there is no server, and no server's data")
    return run


async def refuse_other_run(run: Run, connection: "RunConnection") -> None:
    """Refuse to change a run on the server that is not the one in the folder, though it has its name.

    Raises:
        RunMismatchError: they are two runs.
    """
    import anyio.to_thread

    from stream.connection.run_identity import read_identity, read_server_identity

    if run.folder is None:
        return
    ours = await anyio.to_thread.run_sync(read_identity, run.folder)
    server = await read_server_identity(connection)
    if ours is not None and server.id and server.id != ours.id:
        raise RunMismatchError(
            f"run {run.name!r} on {connection.display_url} is {server.id[:8]}, and the run in {run.folder} is "
            f"{ours.id[:8]}: nothing was changed; name the server of this one with --redis, or the other run's "
            "folder"
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
    live = [file for file in files if read_live(file.parent) is not None]
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
