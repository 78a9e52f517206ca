"""The trainer's right to the run's files: what `Tenure` is on the server, on the disk.

A trainer that was suspended, or cut off from the server, does not know that it has a successor. The server refuses it
by its token; a file would not. So each trainer, before it reads a checkpoint, writes its token into `trainer.lock`, and
whatever it changes later it changes while it has that file locked and finds its own token in it::

    fence = RunFolderLock.acquire(folder, tenure.token)
    with fence.held():                # FencedError where a successor has taken the folder
        ...                           # short: a successor waits for it, and for nothing else

What a predecessor did came before the successor read the folder, or does not happen. The kernel lets go of the lock of
a process that dies. On a shared file system this holds across hosts if the file system has locks (`flock`); where it
has none, the token alone is looked at, and a trainer that wakes between look and write goes unseen.
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

log = structlog.get_logger()

LOCK_FILE: Final = "trainer.lock"
_LINE_BYTES = 120
_TIMEOUT_S = 30.0
"""Far more than whoever is alive needs for what it does while it has the lock."""
_MAX_DELAY_S = 0.05


class RunFolderLock:
    """A trainer's right to change the run's files.

    Args:
        folder: the run's.
        token: of the trainer's tenure. They only grow.
        timeout_s: how long to wait for somebody else's change to be done.
    """

    def __init__(self, folder: Path, token: int, timeout_s: float = _TIMEOUT_S) -> None:
        self.token = token
        self._path = folder / LOCK_FILE
        self._timeout_s = timeout_s

    @classmethod
    def acquire(cls, folder: Path, token: int, timeout_s: float = _TIMEOUT_S) -> "RunFolderLock":
        """Take the folder from whoever had it before.

        Raises:
            FencedError: a younger trainer has it; or a process has kept the lock for `patience_s`.
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
        """Around a change of files; short, since a successor waits for it.

        Raises:
            FencedError: a successor has taken the folder; or a process has kept the lock for `patience_s`.
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
        """Lock the file; by trying again, since `flock` itself knows no deadline."""
        deadline, delay = time.monotonic() + self._timeout_s, 0.001
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    _, host, pid, *_ = (*_read_line(descriptor).split(), "an unknown host", "unknown")
                    raise FencedError(
                        f"{self._path} was locked for {self._timeout_s:g} s: a trainer is suspended in the middle of "
                        f"a write, process {pid} on {host} unless it is one that has begun since; end it, and run again"
                    ) from None
            except OSError as error:
                log.warning("folder_lock.unsupported", path=str(self._path), why=str(error))
                return
            else:
                return
            time.sleep(delay)
            delay = min(2 * delay, _MAX_DELAY_S)


def last_token(folder: Path) -> int:
    """The token of the last trainer that had the folder; 0 before the first. A new one has to be above it."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY)
    except FileNotFoundError:
        return 0
    try:
        return _read_token(descriptor)
    finally:
        os.close(descriptor)


def hold_optional(lock: RunFolderLock | None) -> AbstractContextManager[None]:
    """`held`; nothing where there is no fence, because nobody else can be there."""
    return nullcontext() if lock is None else lock.hold()


def _read_line(descriptor: int) -> str:
    return os.pread(descriptor, _LINE_BYTES, 0).decode(errors="replace")


def _read_token(descriptor: int) -> int:
    """The token in the file; 0 where there is none, since it is new, or a machine that failed forgot its content."""
    words = _read_line(descriptor).split()
    return int(words[0]) if words and words[0].isdecimal() else 0
