"""The files of a sandbox of the provider `process`, as its process 1 handles them; see `envs.sandboxes.launcher`.

It runs with the standard library of any Python from 3.9 on. A policy owns these files: links, pipes, sparse and
unreadable files, names that are no text, and paths too long for a name are all to be expected.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from typing import Any


def read_file(path: str, max_bytes: int) -> bytes:
    """Return the content of a regular file.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not regular, or larger.
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no regular file")
        content = bytearray()
        while len(content) <= max_bytes and (chunk := os.read(descriptor, max_bytes + 1 - len(content))):
            content += chunk
    finally:
        os.close(descriptor)
    if len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes} bytes")
    return bytes(content)


def write_files(entries: list[tuple[str, str, int, int]], source: int) -> None:
    """Write files.

    Args:
        entries: path, kind (`file`, `folder`), mode and size of each.
        source: descriptor of a file in which their contents follow one another.
    """
    for path, kind, mode, size in entries:
        if kind == "folder":
            os.makedirs(path, exist_ok=True)  # noqa: PTH103
            continue
        os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(os.lstat(path).st_mode):
                os.unlink(path)  # noqa: PTH108
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            left = size
            while left and (sent := os.sendfile(target, source, None, left)):
                left -= sent
            os.fchmod(target, mode)
        finally:
            os.close(target)


def manifest(folders: list[str]) -> dict[str, tuple[int, ...]]:
    """Return what is compared of each file in folders."""
    found: dict[str, tuple[int, ...]] = {}
    for path in paths(folders):
        with suppress(OSError):
            state = os.lstat(path)
            if not stat.S_ISDIR(state.st_mode):
                found[path] = (state.st_ino, state.st_mode, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
    return found


def changes(before: dict[str, tuple[int, ...]], now: dict[str, tuple[int, ...]]) -> list[tuple[str, str]]:
    """Return the paths at which two manifests differ, sorted, each with `added`, `modified` or `deleted`."""
    changed = [(path, "deleted") for path in before if path not in now]
    for path, state in now.items():
        if before.get(path) != state:
            changed.append((path, "modified" if path in before else "added"))
    return sorted((os.fsencode(path).decode("utf-8", "replace"), kind) for path, kind in changed)


def save(folders: list[str], target: int, max_bytes: int) -> None:
    """Write folders to a descriptor, as a tar archive.

    Files are left out that have more than is left of `max_bytes`: a sparse one may be as large as it likes.
    """
    import tarfile

    left = max_bytes
    with os.fdopen(os.dup(target), "wb") as file, tarfile.open(fileobj=file, mode="w|") as archive:
        for path in paths(folders):
            with suppress(OSError):
                member = archive.gettarinfo(path, path)
                if member is None:  # a socket
                    continue
                if not member.isreg():
                    archive.addfile(member)
                elif member.size <= left:
                    left -= member.size
                    with _opened(path, member.mode) as content:
                        archive.addfile(member, content)


def restore(source: int) -> None:
    """Make the files of an archive that `save` has written."""
    import tarfile

    with os.fdopen(os.dup(source), "rb") as file, tarfile.open(fileobj=file, mode="r|") as archive:
        archive.extraction_filter = lambda member, _: member  # it touches this sandbox alone
        archive.extractall("/")  # noqa: S202


def _opened(path: str, mode: int) -> Any:
    if mode & stat.S_IRUSR:
        return open(path, "rb")  # noqa: PTH123
    os.chmod(path, mode | stat.S_IRUSR)  # noqa: PTH101
    try:
        return open(path, "rb")  # noqa: PTH123
    finally:
        os.chmod(path, mode)  # noqa: PTH101


def paths(folders: list[str]) -> Iterator[str]:
    """Return what lies in folders, folders before what is in them; without what no path can name."""
    waiting = list(folders)
    while waiting:
        folder = waiting.pop()
        with suppress(OSError):
            if not os.access(folder, os.R_OK | os.X_OK):
                os.chmod(folder, 0o700)  # noqa: PTH101  (nothing of it would be seen)
            with os.scandir(folder) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
            for entry in found:
                yield entry.path
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
