"""Full disks: the one place of a process where a write that finds no room waits for it, and says so.

::

    persist(path, write)      call `write`; while the disk of `path` has no room, wait and call it again
    waiting()                 what this process waits for; a trainer reports it to the run's server
    disk_problem(path)        whether a disk is full now, as seen by anybody who can look at it

A write may be repeated after it failed, so it leaves nothing half done: an append is cut off again, and a file or a
folder gets its name last (`stream.durable`).
"""

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import structlog
from msgspec import Struct

from stream.waiting import Backoff

log = structlog.get_logger()

LEAST_FREE_BYTES: Final = 1 << 19
"""A disk with less is full: neither a step's records nor the server's find room."""
NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors that end when there is room again, or when the disk is mounted writable."""
_LIMIT_S: Final = 600.0
_BACKOFF = Backoff(0.2, 5.0)
T = TypeVar("T")


class DiskProblem(Struct, frozen=True, kw_only=True):
    """A disk that cannot be written."""

    path: str
    """File or folder that was to be written."""
    why: str
    """In the system's words."""
    free_bytes: int | None = None
    """None: unknown."""

    def __str__(self) -> str:
        free = "" if self.free_bytes is None else f", {self.free_bytes // 1024:,} KiB are free"
        return f"the disk of {self.path} cannot be written: {self.why}{free}"


class _Waits:
    """What the threads of this process wait for."""

    def __init__(self) -> None:
        self.problems: dict[int, DiskProblem] = {}
        """By thread."""
        self.limit_s: float | None = None
        self.ended = threading.Event()
        """Set: nothing waits any more."""


_waits = _Waits()


def limit_waits(seconds: float) -> None:
    """Set how long this process waits for room before it fails."""
    _waits.limit_s = seconds


def wait_limit_s(otherwise: float = _LIMIT_S) -> float:
    """Return how long this process waits for room before it fails; `otherwise` if no limit was set."""
    return otherwise if _waits.limit_s is None else _waits.limit_s


def end_waits() -> None:
    """Let everything that waits for room fail at once, because this process is to end."""
    _waits.ended.set()


def allow_waits() -> None:
    """Undo `end_waits`: a new run begins in this process."""
    _waits.ended.clear()


def waiting() -> list[DiskProblem]:
    """Return what this process waits for now, one problem for each path."""
    return list({problem.path: problem for problem in list(_waits.problems.values())}.values())


def persist(path: Path, write: Callable[[], T], errors: tuple[type[Exception], ...] = (OSError,)) -> T:
    """Call `write`, and again after a delay for as long as its disk has no room. Blocks; for threads.

    Args:
        path: what is written, for messages and to ask how much is free.
        write: leaves nothing half done if it raises.
        errors: may mean a full disk; the text of one that is no `OSError` says whether it does.

    Raises:
        OSError: the disk fails for another reason, the limit is over, or `end_waits` was called; so for other types in
            `errors`.
    """
    began = time.monotonic()
    for attempt in range(1, 1_000_000):
        try:
            result = write()
        except errors as error:
            why = no_room(error)
            if not why or _waits.ended.is_set() or time.monotonic() - began > wait_limit_s():
                _waits.problems.pop(threading.get_ident(), None)
                raise
            _note(path, why, is_first=attempt == 1)
        else:
            if _waits.problems.pop(threading.get_ident(), None) is not None:
                log.info("disk.recovered", path=str(path), seconds=round(time.monotonic() - began, 1))
            return result
        _waits.ended.wait(_BACKOFF.delay_s(attempt))
    raise AssertionError("unreachable: the limit ends it long before")


def _note(path: Path, why: str, *, is_first: bool) -> None:
    problem = DiskProblem(path=str(path), why=why, free_bytes=free_bytes(path))
    _waits.problems[threading.get_ident()] = problem
    if is_first:
        log.warning("disk.waiting", path=problem.path, why=why, free_bytes=problem.free_bytes)


def no_room(error: BaseException) -> str:
    """Return the system's words for an error that means a disk without room; empty if it is another one."""
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno) if error.errno in NO_ROOM else ""
    text = str(error)  # of a library that is not written in Python, such as safetensors
    return next((os.strerror(number) for number in NO_ROOM if os.strerror(number) in text), "")


def disk_problem(path: Path) -> DiskProblem | None:
    """Return why the disk of a file or folder is full; None if it is not, or cannot be asked. Blocks."""
    facts = _facts(path)
    if facts is None or not facts.f_blocks:  # some file systems do not say how large they are
        return None
    free, why = _free(facts), os.strerror(errno.ENOSPC)
    if free < LEAST_FREE_BYTES:
        return DiskProblem(path=str(path), why=why, free_bytes=free)
    if facts.f_files and not (facts.f_ffree if os.geteuid() == 0 else facts.f_favail):
        return DiskProblem(path=str(path), why=f"{why}: it can hold no more files", free_bytes=free)
    return None


def free_bytes(path: Path) -> int | None:
    """Return the free bytes on the disk of a path, which need not exist; None if it cannot be asked. Blocks."""
    facts = _facts(path)
    return None if facts is None else _free(facts)


def _free(facts: os.statvfs_result) -> int:
    """Return the bytes that this user may still write: a part may be kept for root."""
    return facts.f_frsize * (facts.f_bfree if os.geteuid() == 0 else facts.f_bavail)


def _facts(path: Path) -> os.statvfs_result | None:
    """Ask the file system of a path, or of the nearest folder above it that exists."""
    for place in (path, *path.parents):
        try:
            return os.statvfs(place)
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None
