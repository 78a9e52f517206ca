"""Which sandboxes of the provider `process` live on a machine: a file for each, which workers of one user share.

A worker that is killed takes its sandboxes with it and leaves these files; whatever reads the folder next removes them.
A process is known by its id and the time at which it started, so a file never names a process that came later.
"""

import os
import re
import select
import signal
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SUFFIX: Final = ".json"


class ProcessEntry(Struct, frozen=True, kw_only=True):
    """A sandbox, as other workers know it."""

    name: str
    run_id: str
    begun: float
    """Unix time in seconds."""
    pid: int
    """Of its process 1, as this machine numbers it."""
    started: int
    """When that process started, in ticks since boot."""


class ProcessRegistry:
    """The files of a folder that only one user can read. All methods block.

    Args:
        folder: made if it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def prepare(self) -> None:
        """Make the folder, and remove the files of sandboxes that have ended.

        Raises:
            OSError: it cannot be made, or belongs to another user.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = self._folder.lstat()
        if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o077:
            raise PermissionError(f"{self._folder} has to be a folder that this user alone can open")
        self.entries()

    def add(self, entry: ProcessEntry) -> None:
        """Note a sandbox that has started."""
        path = self._path(entry.name)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(msgspec.json.encode(entry))
        unfinished.replace(path)

    def entries(self) -> list[ProcessEntry]:
        """Return the sandboxes that live; files of others are removed."""
        found = (self.find(path.stem) for path in sorted(self._folder.glob(f"*{_SUFFIX}")))
        return [entry for entry in found if entry is not None]

    def find(self, name: str) -> ProcessEntry | None:
        """Return a sandbox that lives; None if there is none of this name."""
        path = self._path(name)
        try:
            entry = msgspec.json.decode(path.read_bytes(), type=ProcessEntry)
        except FileNotFoundError:
            return None
        except (msgspec.DecodeError, ValueError):
            entry = None
        if entry is None or start_time(entry.pid) != entry.started:
            path.unlink(missing_ok=True)
            return None
        return entry

    def discard(self, name: str) -> None:
        """Forget a sandbox."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name for a sandbox: letters, digits, and . _ - inside")
        return self._folder / f"{name}{_SUFFIX}"


def kill_and_wait(entry: ProcessEntry, timeout_s: float) -> bool:
    """Kill a sandbox with all of its processes; returns whether it has ended. Blocks."""
    try:
        descriptor = os.pidfd_open(entry.pid)
    except ProcessLookupError:
        return True
    try:
        if start_time(entry.pid) != entry.started:  # from here on, the descriptor names this process and no other
            return True
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        return bool(ended.poll(timeout_s * 1000))
    finally:
        os.close(descriptor)


def start_time(pid: int) -> int:
    """Return when a process started, in ticks since boot; 0 if it does not live."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def only_child(pid: int) -> int:
    """Return the child of a process that has one.

    Raises:
        OSError: the process has ended, or has no child.
    """
    children = Path(f"/proc/{pid}/task/{pid}/children").read_bytes().split()
    if len(children) != 1:
        raise ProcessLookupError(f"process {pid} has {len(children)} children")
    return int(children[0])
