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
    stopping: str = ""
    """How it ends, such as `draining`; empty: nobody asked it to."""

    @classmethod
    def of_this_process(cls, run: str, redis: str, engines: tuple[str, ...] = ()) -> "LiveRun":
        """Return what `live.json` says of a run whose supervisor is this process."""
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


def write_live(folder: Path, live: LiveRun) -> None:
    """Write `live.json`; only its owner can read it if the server's URL contains a password."""
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
            f"{folder / 'live.json'} is for another user to read; name the server with --redis"
        ) from error
    except ValueError as error:
        raise PenstockError(f"{folder / 'live.json'} is broken: {error}; remove it if nothing runs there") from error
    return live if live.is_running else None
