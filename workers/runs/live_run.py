"""`live.json` in a run's folder: which process runs it, and where its server and its engines are."""

import os
import socket
import sys
from pathlib import Path

import msgspec
from msgspec import Struct

from stream.connection.address import has_secret
from stream.durable import write_file_atomically
from stream.errors import PenstockError


class LiveRun(Struct, kw_only=True):
    """Content of `live.json`: what another process must know to reach a run that is running."""

    run: str
    redis: str
    engines: tuple[str, ...] = ()
    pid: int
    """Process id of the supervisor."""
    host: str = ""
    """Host of the supervisor; empty: this one."""
    process_start: str = ""
    """Boot and start time of the supervisor (see `process_start`), since another process may get its id later."""
    stopping: str = ""
    """How the run is being stopped, such as `draining`; empty: no stop was requested."""

    @classmethod
    def of_this_process(cls, run: str, redis: str, engines: tuple[str, ...] = ()) -> "LiveRun":
        """Return what `live.json` says of a run whose supervisor is this process."""
        start = process_start(os.getpid())
        return cls(
            run=run, redis=redis, engines=engines, pid=os.getpid(), host=socket.gethostname(), process_start=start
        )

    @property
    def is_running(self) -> bool:
        """Whether the supervisor is running; one on another host cannot be checked, and is assumed to run."""
        if self.host not in {"", socket.gethostname()}:
            return True
        start = process_start(self.pid)
        return bool(start) and self.process_start in {"", start}


def process_start(pid: int) -> str:
    """Return boot id and start time, which a later process with the same id does not share; empty without a process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{fields[19]}"
    except (FileNotFoundError, ProcessLookupError):
        if sys.platform == "linux":
            return ""
    import psutil  # imported here because Linux does not need it

    try:
        return str(psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return ""


def write_live(folder: Path, live: LiveRun) -> None:
    """Write `live.json`; if the server's URL contains a password, only the file's owner can read it."""
    payload = msgspec.json.format(msgspec.json.encode(live)) + b"\n"
    write_file_atomically(folder / "live.json", payload, private=has_secret(live.redis))


def remove_live(folder: Path) -> None:
    """Remove `live.json`, because the run is no longer running."""
    (folder / "live.json").unlink(missing_ok=True)


def read_live(folder: Path) -> LiveRun | None:
    """Return the content of `live.json`; None if there is no such file, or its supervisor has exited.

    Raises:
        PenstockError: the file is damaged, or belongs to another user.
    """
    try:
        live = msgspec.json.decode((folder / "live.json").read_bytes(), type=LiveRun)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as error:
        raise PenstockError(
            f"{folder / 'live.json'} belongs to another user, who alone can read it; name the server with --redis"
        ) from error
    except ValueError as error:
        raise PenstockError(
            f"{folder / 'live.json'} is damaged: {error}; remove it if the run is not running"
        ) from error
    return live if live.is_running else None
