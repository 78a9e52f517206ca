"""How much a program may add to its folder. No file system that a user can mount counts that, so it is measured.

Files that were deleted while a process holds them open take room, too, and are counted. A program can write some
gigabytes in the second between two looks, so a quota does not replace free space on the disk. What is in a folder that
this user may not list is not seen.
"""

import os
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import anyio
import psutil
from anyio import to_thread
from anyio.abc import Process

_INTERVAL_S: Final = 1.0
_REST: Final = 20.0
"""Between two looks, as a multiple of what the last one took: it reads the state of every file."""
_BLOCK: Final = 512


class FolderQuota:
    """Ends a process whose folder grows too much.

    Args:
        folder: of the process.
        most_bytes: by which it may grow.

    Attributes:
        is_exceeded: it grew by more, and the process was killed.
    """

    def __init__(self, folder: str, most_bytes: int) -> None:
        self.is_exceeded = False
        self._folder, self._most = folder, most_bytes

    @asynccontextmanager
    async def watch(self, process: Process) -> AsyncIterator[None]:
        """Look at the folder until the context is left; kill the process if the quota is exceeded."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch, process)
            yield
            tasks.cancel_scope.cancel()

    async def _watch(self, process: Process) -> None:
        first = await to_thread.run_sync(used_bytes, self._folder, process.pid)
        rest = _INTERVAL_S
        while not self.is_exceeded:
            await anyio.sleep(rest)
            began = anyio.current_time()
            used = await to_thread.run_sync(used_bytes, self._folder, process.pid)
            rest = max(_INTERVAL_S, _REST * (anyio.current_time() - began))
            if used - first > self._most:
                self.is_exceeded = True
                with suppress(ProcessLookupError):
                    process.kill()  # its sandbox ends with it


def used_bytes(folder: str, pid: int) -> int:
    """Return the bytes of disk that a folder takes, with deleted files that a process or its descendants hold open."""
    sizes = dict(_files(folder))
    sizes |= _deleted_files(pid, {device for device, _ in sizes})
    return _BLOCK * sum(sizes.values())


def _files(folder: str) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield device and number of each file and folder, and its blocks; a file with two names comes twice."""
    for place, folders, names in os.walk(folder):
        for name in (*folders, *names, "."):
            with suppress(OSError):  # it was removed meanwhile
                found = os.lstat(Path(place, name))
                yield (found.st_dev, found.st_ino), found.st_blocks


def _deleted_files(pid: int, devices: set[int]) -> dict[tuple[int, int], int]:
    """Return device, number and blocks of files on these devices that have no name any more."""
    sizes: dict[tuple[int, int], int] = {}
    with suppress(psutil.Error, OSError):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(OSError):  # it has ended
                for opened in Path(f"/proc/{process.pid}/fd").iterdir():
                    with suppress(OSError):
                        found = opened.stat()
                        if not found.st_nlink and stat.S_ISREG(found.st_mode) and found.st_dev in devices:
                            sizes[found.st_dev, found.st_ino] = found.st_blocks
    return sizes
