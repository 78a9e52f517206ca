"""The run's folder: it belongs to one run, and one supervisor at a time uses it.

::

    runs/NAME/  run.toml        the resolved settings; `penstock run runs/NAME/run.toml` resumes
                identity.json   id of the run, and what must not change in it (`stream.connection.run_identity`)
                live.json       URL of the server; exists while the run is running
                logs/           one log file per process
                redis/          the private server's data
                trainer.lock    which trainer may change checkpoints, ledger and metrics (`stream.trainer.folder_lock`)
                summary.json    result of the last start
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from stream.connection.address import has_secret
from stream.errors import PenstockError
from workers.settings import Settings
from workers.settings.toml_file import dump_settings


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock the folder for one supervisor until the block, or this process, ends.

    Raises:
        PenstockError: another process holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "supervisor.lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise PenstockError(
                f"{folder} is in use by process {file.read().strip()}: a run has one supervisor; stop that one first, "
                "or give this run another run.name"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def write_settings(settings: Settings) -> Path:
    """Write the resolved settings to `run.toml`. Returns the file, which the roles read."""
    file = settings.folder / "run.toml"
    write_atomically(file, dump_settings(settings).encode(), private=has_secret(settings.run.redis))
    return file


def write_atomically(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a file completely or not at all; `private`: only its owner can read it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600 if private else 0o666), "wb") as file:  # noqa: PTH123
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
