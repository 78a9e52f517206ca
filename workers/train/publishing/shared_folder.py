"""Whole weights through a file system that trainer and engines share."""

from pathlib import Path
from typing import ClassVar

from workers.engine_api.wire import WEIGHT_TRANSFER_BACKEND
from workers.train.publishing.engine_control import EngineControlClient


class SharedFolderTransfer:
    """Sends the folder's path; the engine reads the files. A `Transfer`."""

    backend: ClassVar[str] = WEIGHT_TRANSFER_BACKEND
    start_hint: ClassVar[str] = ", with penstock-vllm installed beside vLLM"

    async def prepare(self, path: Path) -> None:
        """Nothing to do: the files are in place."""

    async def transfer(self, engine: EngineControlClient, path: Path, version: int) -> None:
        """Send the path; see `Transfer`."""
        await engine.start_update()
        await engine.update_weights({"path": str(path)})
        await engine.finish_update(version)
