"""Durable writes: bytes, files and whole folders that survive a crash of the machine, or are absent."""

import io
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Final

_NEW: Final = os.O_CREAT | os.O_EXCL | os.O_WRONLY


def write_all(file: io.FileIO, data: bytes) -> None:
    """Write all of `data` to an unbuffered file; one call of `write` may accept only a part.

    Raises:
        OSError: the disk is full or fails; part of the data may have been written.
    """
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def append_all(file: io.FileIO, *parts: bytes) -> None:
    """Append all parts to an unbuffered file, or nothing: what was written of them is cut off again.

    Raises:
        OSError: the disk is full or fails.
    """
    end = file.seek(0, os.SEEK_END)
    try:
        for part in parts:
            write_all(file, part)
    except OSError:
        file.truncate(end)
        file.seek(end)
        raise


def write_file_atomically(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a file completely or not at all; it is on the disk on return. A device or a pipe is written directly.

    Args:
        path: of the file; its folder exists.
        content: all of it.
        private: only its owner can read it.

    Raises:
        OSError: the disk is full or fails; an earlier file of this name stays as it was, and nothing is left behind.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with open(os.open(temporary, _NEW, 0o600 if private else 0o666), "wb", buffering=0) as file:  # noqa: PTH123
            write_all(file, content)
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync_path(path.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def fsync_path(path: Path) -> None:
    """Force a file, or a folder's list of names, to the disk. A new file needs both: its own `fsync` omits its name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def create_folder_atomically(
    target: Path, rename_guard: AbstractContextManager[object] | None = None
) -> Iterator[Path]:
    """Yield an empty folder that is renamed to `target` when the block succeeds, and is removed when it fails.

    After the block all files, and the folder's name, are on the disk. The files have the folder's permissions:
    safetensors would leave its own readable for their owner alone.

    Args:
        target: the final path.
        rename_guard: entered around the rename; if it raises, nothing is renamed.

    Raises:
        FileExistsError: `target` exists.
        OSError: the disk is full or fails; nothing is left behind.
    """
    if target.exists():
        raise FileExistsError(f"{target} exists already; nothing was written")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".{target.name}.{uuid.uuid4().hex}.tmp"
    temporary.mkdir()
    try:
        yield temporary
        mode = temporary.stat().st_mode & 0o666
        for folder, _, names in os.walk(temporary):
            for name in names:
                (Path(folder) / name).chmod(mode)
                fsync_path(Path(folder) / name)
            fsync_path(Path(folder))
        with rename_guard or nullcontext():
            temporary.rename(target)
            fsync_path(target.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove_folder(folder: Path) -> None:
    """Remove a folder if possible. It is renamed first, so a kill never leaves half of its files under its name."""
    with suppress(OSError):
        renamed = folder.rename(folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp"))
        shutil.rmtree(renamed, ignore_errors=True)


def remove_leftovers(parent: Path) -> int:
    """Remove folders that a killed process left half written or half removed.

    Returns:
        How many were removed.
    """
    leftovers = list(parent.glob(".*.tmp"))
    for leftover in leftovers:
        shutil.rmtree(leftover, ignore_errors=True)
    return len(leftovers)
