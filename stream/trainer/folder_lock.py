"""The trainer's lock on the run's files: the counterpart on disk of the trainer's lease on the server.

A trainer that was suspended, or cut off from the server, does not know that another one has taken over. The server
refuses it by its fencing token; a file would not. So each trainer writes its token into `trainer.lock` before it
reads a checkpoint, and changes files only while it holds the lock of that file and finds its own token in it::

    lock = RunFolderLock.acquire(folder, lease.token)
    with lock.hold():                 # FencedError if another trainer has taken over the folder
        ...                           # short, because the next trainer waits for it

So a change by an earlier trainer is complete before the next one reads the folder, or it does not happen. The kernel
releases the lock of a process that dies. On a shared file system this works across hosts if the file system supports
`flock`. Without `flock` only the token is checked, and a trainer suspended between check and write is not noticed.
"""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Final

import structlog

from stream.errors import FencedError
from stream.waiting import Backoff

log = structlog.get_logger()

LOCK_FILE: Final = "trainer.lock"
_LINE_BYTES = 120
_TIMEOUT_S = 30.0
"""Much longer than a running trainer holds the lock."""
_BACKOFF = Backoff(0.001, 0.05, jitter=0.0)


class RunFolderLock:
    """A trainer's right to change the run's files.

    Args:
        folder: of the run.
        token: the trainer's fencing token; tokens only grow.
        timeout_s: how long to wait for another process to release the lock.
    """

    def __init__(self, folder: Path, token: int, timeout_s: float = _TIMEOUT_S) -> None:
        self.token = token
        self._path = folder / LOCK_FILE
        self._timeout_s = timeout_s

    @classmethod
    def acquire(cls, folder: Path, token: int, timeout_s: float = _TIMEOUT_S) -> "RunFolderLock":
        """Take over the folder from an earlier trainer.

        Raises:
            FencedError: a later trainer has it, or another process has held the lock for `timeout_s`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        lock = cls(folder, token, timeout_s)
        with lock._locked() as descriptor:
            lock._raise_fenced_unless(_read_token(descriptor) <= token)
            who = f"{token} {socket.gethostname()} {os.getpid()}"
            os.pwrite(descriptor, who.ljust(_LINE_BYTES - 1)[: _LINE_BYTES - 1].encode() + b"\n", 0)  # one write
            os.fsync(descriptor)
        return lock

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Enclose a change of files; keep it short, because the next trainer waits for it.

        Raises:
            FencedError: a later trainer has taken over the folder, or another process has held the lock for
            `timeout_s`.
        """
        with self._locked() as descriptor:
            self._raise_fenced_unless(_read_token(descriptor) == self.token)
            yield

    def _raise_fenced_unless(self, is_ours: bool) -> None:
        if not is_ours:
            raise FencedError(f"another trainer has taken over the folder {self._path.parent}; this one must stop")

    @contextmanager
    def _locked(self) -> Iterator[int]:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._lock(descriptor)
            yield descriptor
        finally:
            os.close(descriptor)

    def _lock(self, descriptor: int) -> None:
        """Lock the file. Polls, because `flock` has no timeout."""
        deadline, attempt = time.monotonic() + self._timeout_s, 0
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    _, host, pid, *_ = (*_read_line(descriptor).split(), "an unknown host", "unknown")
                    raise FencedError(
                        f"{self._path} was locked for {self._timeout_s:g} s: a trainer is suspended in the middle of a "
                        f"write, process {pid} on {host} unless a later one holds the lock; end it, and run again"
                    ) from None
            except OSError as error:
                log.warning("folder_lock.unsupported", path=str(self._path), why=str(error))
                return
            else:
                return
            attempt += 1
            time.sleep(_BACKOFF.delay_s(attempt))


def last_token(folder: Path) -> int:
    """Return the token of the last trainer that had the folder; 0 before the first. A new token must be larger."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY)
    except FileNotFoundError:
        return 0
    try:
        return _read_token(descriptor)
    finally:
        os.close(descriptor)


def hold_optional(lock: RunFolderLock | None) -> AbstractContextManager[None]:
    """Return `lock.hold()`, or a context that does nothing if there is no lock because no other trainer can exist."""
    return nullcontext() if lock is None else lock.hold()


def _read_line(descriptor: int) -> str:
    return os.pread(descriptor, _LINE_BYTES, 0).decode(errors="replace")


def _read_token(descriptor: int) -> int:
    """Return the token in the file; 0 if the file is new, or lost its content in a machine failure."""
    words = _read_line(descriptor).split()
    return int(words[0]) if words and words[0].isdecimal() else 0
