"""How weights reach engines: the `WeightTransport` protocol, and the transport that the settings name."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from workers.settings import Settings
from workers.train.publishing.engine_control import EngineControlClient


class WeightTransport(Protocol):
    """Moves one policy version from its folder to one engine."""

    async def prepare(self, path: Path) -> None:
        """Prepare a folder for sending; called once per version, before any engine is contacted.

        Args:
            path: absolute path of a folder in Hugging Face form.
        """

    async def check(self, engine: EngineControlClient) -> None:
        """Check that an engine can receive weights by this transport.

        Raises:
            EngineRefusedError: it cannot; the message says how the engine must be started.
        """

    async def send(self, engine: EngineControlClient, path: Path, version: int) -> None:
        """Try once to give an engine a prepared version. After an `EngineError` it may be called again.

        Raises:
            EngineRefusedError: the weights do not fit the engine's model; the engine continues with its old weights.
            EngineError: any other failure.
        """

    async def abort(self, engine: EngineControlClient, error: Exception) -> None:
        """Let an engine continue with its old weights, if it still has them, after the last `send` failed."""


@asynccontextmanager
async def open_transport(settings: Settings) -> AsyncIterator[WeightTransport]:
    """Yield the transport that the settings name.

    Raises:
        SettingsError: this machine lacks something that the transport needs.
    """
    from workers.train.publishing.paused_update import PausedUpdate
    from workers.train.publishing.shared_folder import SharedFolderTransfer

    weights = settings.weights
    if settings.publishes_adapters:
        from workers.train.publishing.adapter_update import AdapterUpdate

        yield AdapterUpdate(settings.lora.rank)
    elif weights.transport == "http":
        from workers.train.publishing.http_transfer import serve_weights

        async with serve_weights(settings.run.host, settings.run.port) as http_transfer:
            yield PausedUpdate(http_transfer, keep_kv_cache=weights.kv_cache == "keep")
    elif weights.transport == "nccl":
        from workers.train.publishing.nccl_transfer import NcclTransfer

        with NcclTransfer(settings.run.host) as nccl_transfer:
            yield PausedUpdate(nccl_transfer, keep_kv_cache=weights.kv_cache == "keep")
    else:
        yield PausedUpdate(SharedFolderTransfer(), keep_kv_cache=weights.kv_cache == "keep")
