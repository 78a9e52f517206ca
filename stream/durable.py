"""Bytes that are on the disk: written to the last one, forced there, and their file's name with them."""

import io
import os
from pathlib import Path


def write_all(file: io.FileIO, data: bytes) -> None:
    """Write all of `data` to an unbuffered file: the system may take it in parts.

    Raises:
        OSError: the disk is full, or refuses; part of it may have been written.
    """
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def fsync_path(path: Path) -> None:
    """Force a file, or a folder with the names in it, to the disk: `fsync` of a new file alone leaves out its name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
