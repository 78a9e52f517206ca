"""Small file systems in memory, and how to leave no room on one."""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

BALLAST = "ballast"
"""File that `fill` writes; remove it to make room again."""


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a file system of this size (`64k`, `32m`) on a folder while the context is open.

    Raises:
        CalledProcessError: this user may not do so.
        FileNotFoundError: there is no `mount` here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, capture_output=True)


def skip_without_disk(folder: Path, size: str) -> Iterator[Path]:
    """Yield a small disk to the test of a fixture; skip the test where it cannot be mounted."""
    with ExitStack() as stack:
        try:
            disk = stack.enter_context(small_disk(folder, size))
        except (subprocess.CalledProcessError, FileNotFoundError):
            pytest.skip("this user may not mount a file system")
        yield disk


def fill(folder: Path) -> None:
    """Write until there is no room."""
    with (folder / BALLAST).open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 10, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue
