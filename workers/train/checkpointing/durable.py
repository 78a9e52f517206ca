"""Folders that are there whole, or not at all: written beside their place, forced to disk, then renamed.

They go the same way: renamed, then removed.
"""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from stream.durable import fsync_path


@contextmanager
def create_folder_atomically(
    target: Path, rename_guard: AbstractContextManager[object] | None = None
) -> Iterator[Path]:
    """Yield an empty folder that becomes `target` when the block ends well, and vanishes when it does not.

    On return every file of it, and its name, are on the disk.

    Args:
        target: its name in the end.
        rename_guard: entered for the moment in which it gets that name; what it raises, it does not get it.

    Raises:
        FileExistsError: there is something at `target` already.
        OSError: the disk is full, or refuses; nothing is left behind.
    """
    if target.exists():
        raise FileExistsError(f"{target} exists already; nothing was written")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".{target.name}.{uuid.uuid4().hex}.tmp"
    temporary.mkdir()
    try:
        yield temporary
        for folder, _, names in os.walk(temporary):
            for name in names:
                fsync_path(Path(folder) / name)
            fsync_path(Path(folder))
        with rename_guard or nullcontext():
            temporary.rename(target)
            fsync_path(target.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove_folder(folder: Path) -> None:
    """Remove a folder, where that is possible; no kill leaves one under that name with half of its files."""
    with suppress(OSError):
        rest = folder.rename(folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp"))
        shutil.rmtree(rest, ignore_errors=True)


def remove_leftovers(parent: Path) -> int:
    """Remove what a killed process left half written, or half removed, in this folder.

    Returns:
        How many folders were removed.
    """
    leftovers = list(parent.glob(".*.tmp"))
    for leftover in leftovers:
        shutil.rmtree(leftover, ignore_errors=True)
    return len(leftovers)
