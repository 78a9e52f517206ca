"""`metrics.jsonl`: the metrics of each step, one JSON object per line."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from stream.disk_space import persist
from stream.durable import append_all
from stream.trainer.folder_lock import RunFolderLock, hold_optional


class MetricsLog:
    """An append-only JSON-lines file, which `cut` shortens to the length that a checkpoint holds.

    A trainer that resumes repeats the steps after its checkpoint, and each step must have one line.

    Args:
        path: of the file.
        length: bytes to keep.
        folder_lock: the trainer's lock on the run's folder, if other trainers may exist.
    """

    def __init__(self, path: Path, length: int, folder_lock: RunFolderLock | None = None) -> None:
        self._path = path
        self._length = length
        self._folder_lock = folder_lock
        self._subscribers: list[Callable[[Mapping[str, float | int]], None]] = []

    def cut(self) -> None:
        """Cut the file to its length; a file that is shorter, to its last complete line. Creates a missing one."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with hold_optional(self._folder_lock):
            self._path.touch()
            if self._path.stat().st_size < self._length:
                os.truncate(self._path, self._path.read_bytes().rfind(b"\n") + 1)
            else:
                os.truncate(self._path, self._length)

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._path.stat().st_size

    def subscribe(self, receive: Callable[[Mapping[str, float | int]], None]) -> None:
        """Call `receive` with the metrics of each line after it is written; it must neither block nor raise."""
        self._subscribers.append(receive)

    def append(self, metrics: Mapping[str, float | int]) -> None:
        """Write one line. While the disk is full, this waits for room."""
        line = msgspec.json.encode(metrics) + b"\n"

        def write() -> None:
            with hold_optional(self._folder_lock), self._path.open("ab", buffering=0) as file:
                append_all(file, line)

        persist(self._path, write)
        for receive in self._subscribers:
            receive(metrics)
