"""What a way of giving weights to engines is, and which one the settings name."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from workers.settings import Settings
from workers.train.publishing.engine_control import EngineControlClient


class WeightTransport(Protocol):
    """How one version of the policy gets from its folder to one engine."""

    async def prepare(self, path: Path) -> None:
        """Make a folder ready to be sent; once, before any engine is told of it.

        Args:
            path: a folder in Hugging Face form; absolute.
        """

    async def check(self, engine: EngineControlClient) -> None:
        """See whether an engine can be given weights this way.

        Raises:
            EngineRefusedError: it cannot; says what it has to be started with.
        """

    async def send(self, engine: EngineControlClient, path: Path, version: int) -> None:
        """One try to give it a version that was prepared.

        Raises:
            EngineRefusedError: it says that these are not its model's weights; it goes on with the old ones.
            EngineError: anything else; this may be called again, with nothing between.
        """

    async def abort(self, engine: EngineControlClient, error: Exception) -> None:
        """After the last try failed with that error: let it go on with its old weights, if it has them."""


@asynccontextmanager
async def open_transport(settings: Settings) -> AsyncIterator[WeightTransport]:
    """The way that the settings name, for as long as the context is open.

    Raises:
        SettingsError: it needs what this machine does not have.
    """
    from workers.train.publishing.paused_update import PausedUpdate
    from workers.train.publishing.shared_folder import SharedFolderTransfer

    chosen = settings.weights
    if settings.publishes_adapters:
        from workers.train.publishing.adapter_update import AdapterUpdate

        yield AdapterUpdate(settings.lora.rank)
    elif chosen.transport == "http":
        from workers.train.publishing.http_transfer import serve_weights

        async with serve_weights(settings.run.host, settings.run.port) as served:
            yield PausedUpdate(served, keep_kv=chosen.kv_cache == "keep")
    elif chosen.transport == "nccl":
        from workers.train.publishing.nccl_transfer import NcclTransfer

        with NcclTransfer(settings.run.host) as nccl:
            yield PausedUpdate(nccl, keep_kv=chosen.kv_cache == "keep")
    else:
        yield PausedUpdate(SharedFolderTransfer(), keep_kv=chosen.kv_cache == "keep")
