"""Weights as a path on a file system that trainer and engines share."""

from pathlib import Path
from typing import ClassVar

from workers.engine.wire import BACKEND
from workers.train.publishing.control import Control


class Files:
    """Engines read the folder; a `Carrier`."""

    backend: ClassVar[str] = BACKEND
    remedy: ClassVar[str] = ", with penstock-vllm installed beside vLLM"

    async def prepare(self, path: Path) -> None:
        """It is there."""

    async def carry(self, engine: Control, path: Path, version: int) -> None:
        """Tell where it is; see `Carrier`."""
        await engine.start_update()
        await engine.update({"path": str(path)})
        await engine.finish_update(version)
