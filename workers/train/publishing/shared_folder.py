"""Whole weights through a file system that trainer and engines share."""

from pathlib import Path
from typing import Any, ClassVar

import anyio
import anyio.to_thread

from stream.errors import EngineRefusedError
from workers.engine_api.wire import NEEDS_DIGESTS, WEIGHT_TRANSFER_BACKEND
from workers.train.publishing.engine_control import EngineControlClient
from workers.train.publishing.weight_manifest import file_manifest


class SharedFolderTransfer:
    """Sends the folder's path; the engine reads the files. A `Transfer`."""

    backend: ClassVar[str] = WEIGHT_TRANSFER_BACKEND
    start_hint: ClassVar[str] = ", with penstock-vllm installed beside vLLM"

    def __init__(self) -> None:
        self._hashing = anyio.Lock()
        self._manifest: tuple[Path, list[dict[str, Any]]] | None = None
        """The last folder whose digests an engine wanted, and the digests."""

    async def prepare(self, path: Path) -> None:
        """Nothing to do: the files are in place."""

    async def transfer(self, engine: EngineControlClient, path: Path, version: int) -> None:
        """Send the path, with the digests of the files if the engine wants them; see `Transfer`."""
        await engine.start_update()
        try:
            await engine.update_weights({"path": str(path)})
        except EngineRefusedError as error:
            if NEEDS_DIGESTS not in str(error):
                raise
            await engine.update_weights({"path": str(path), "files": await self._digests(path)})
        await engine.finish_update(version)

    async def _digests(self, path: Path) -> list[dict[str, Any]]:
        """Hash the files once for all engines."""
        async with self._hashing:
            if self._manifest is None or self._manifest[0] != path:
                self._manifest = path, await anyio.to_thread.run_sync(file_manifest, path)
            return self._manifest[1]
