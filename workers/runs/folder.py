"""The run's folder: it belongs to one run, and one supervisor at a time uses it.

::

    runs/NAME/  run.toml        the resolved settings; `penstock run runs/NAME/run.toml` resumes
                identity.json   id of the run, what stays the same in it, and its changes (`run_identity.py`)
                live.json       URL of the server; exists while the run is running
                logs/           one log file per process
                redis/          the private server's data
                trainer.lock    which trainer may change checkpoints, ledger and metrics (`stream.trainer.folder_lock`)
                summary.json    result of the last start
"""

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from stream.connection.address import has_secret
from stream.disk_space import DiskProblem, disk_problem
from stream.durable import write_file_atomically
from stream.errors import PenstockError
from stream.operator.status import RunStatus
from workers.settings import Settings
from workers.settings.run import name_from
from workers.settings.settings import RUNS
from workers.settings.toml_file import dump_settings


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock the folder for one supervisor until the block, or this process, ends.

    Raises:
        PenstockError: another process holds the lock, or the folder cannot be written.
    """
    with unusable_folder(folder):
        folder.mkdir(parents=True, exist_ok=True)
        opened = (folder / "supervisor.lock").open("a+")
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise PenstockError(
                f"{folder} is in use by process {file.read().strip()}: a run has one supervisor; stop that one first, "
                "or give this run another run.name"
            ) from None
        with unusable_folder(folder):
            file.truncate(0)
            os.write(file.fileno(), f"{os.getpid()}\n".encode())
        yield


@contextlib.contextmanager
def unusable_folder(folder: Path) -> Iterator[None]:
    """Turn an error of the disk into one that names the folder."""
    try:
        yield
    except OSError as error:
        raise PenstockError(
            f"{folder} cannot be the run's folder: {error.strerror}; make it writable and make room there, or name "
            "another one as run.folder"
        ) from error


def file_state(file: Path) -> str:
    """Return a text that changes with a file; empty: there is none."""
    try:
        found = file.stat()
    except OSError:
        return ""
    return f"{found.st_size}-{found.st_mtime_ns}"


def new_run_name(file: Path) -> str:
    """Return a name for a new run of a settings file: its stem, the date and the time."""
    return f"{name_from(file.stem)}-{datetime.now().astimezone():%Y%m%d-%H%M%S}"


def find_newest_run(file: Path) -> Path | None:
    """Return the `run.toml` of the newest run that was started from a settings file without `run.name`."""
    pattern = re.compile(re.escape(name_from(file.stem)) + r"-\d{8}-\d{6}")
    found = [folder for folder in RUNS.glob("*") if pattern.fullmatch(folder.name)]
    return max((folder / "run.toml" for folder in found if (folder / "run.toml").is_file()), default=None)


def settings_file(settings: Settings) -> Path:
    """Return the file of the resolved settings in the run's folder, which the roles read."""
    return settings.folder / "run.toml"


def write_settings(settings: Settings) -> Path:
    """Write the resolved settings to `run.toml`. Returns the file."""
    file = settings_file(settings)
    write_file_atomically(file, dump_settings(settings).encode(), private=has_secret(settings.run.redis))
    return file


def replace_last_start(settings: Settings) -> None:
    """Write `run.toml` in place of the last start's, and remove that one's summary: this start may be killed."""
    (settings.folder / "summary.json").unlink(missing_ok=True)
    write_settings(settings)


def disk_problems(folder: Path | None, status: RunStatus | None) -> list[DiskProblem]:
    """Return which disks of a run cannot be written, so that it waits: as everybody can see who looks at it. Blocks.

    Args:
        folder: of the run; None: it is not on this machine.
        status: of the run; None: its server does not answer.
    """
    found = list(status.disk_waits) if status else []
    if status and status.refuses_writes:
        is_private = folder is not None and (folder / "redis").is_dir()
        server = f"{folder}/redis" if is_private else "the Redis server"
        found.append(DiskProblem(path=server, why=f"its {status.refuses_writes} could not be written"))
    if folder is not None:
        devices: set[int] = set()
        for place in (folder, folder / "redis"):
            with contextlib.suppress(OSError):
                device = place.stat().st_dev
                if device not in devices and (problem := disk_problem(place)):
                    found.append(problem)
                devices.add(device)
    return list({problem.path: problem for problem in found}.values())
