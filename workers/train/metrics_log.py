"""`metrics.jsonl`: the metrics of each step, one JSON object per line."""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from stream.trainer.folder_lock import RunFolderLock, hold_optional


class MetricsLog:
    """An append-only JSON-lines file, cut to the length that a checkpoint holds.

    Args:
        path: created if missing.
        length: bytes to keep; what follows belongs to steps that will be repeated.
        folder_lock: the trainer's lock on the run's folder, if other trainers may exist.
    """

    def __init__(self, path: Path, length: int, folder_lock: RunFolderLock | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with hold_optional(folder_lock):
            path.touch()
            os.truncate(path, min(length, path.stat().st_size))
        self._path = path
        self._folder_lock = folder_lock

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._path.stat().st_size

    def append(self, metrics: Mapping[str, float | int]) -> None:
        """Write one line."""
        with hold_optional(self._folder_lock), self._path.open("ab") as file:
            file.write(msgspec.json.encode(metrics) + b"\n")
