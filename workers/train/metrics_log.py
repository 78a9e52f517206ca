"""`metrics.jsonl`: what each step reported, one JSON object a line, for plots and for people."""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from stream.trainer.folder_lock import RunFolderLock, hold_optional


class MetricsLog:
    """The file, cut to what a checkpoint knows of.

    Args:
        path: made where it does not exist.
        length: bytes to keep; what lies behind belongs to steps that are done again.
        fence: the trainer's right to the file, where another one may come.
    """

    def __init__(self, path: Path, length: int, fence: RunFolderLock | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with hold_optional(fence):
            path.touch()
            os.truncate(path, min(length, path.stat().st_size))
        self._path = path
        self._fence = fence

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._path.stat().st_size

    def append(self, metrics: Mapping[str, float | int]) -> None:
        """Write one step."""
        with hold_optional(self._fence), self._path.open("ab") as file:
            file.write(msgspec.json.encode(metrics) + b"\n")
