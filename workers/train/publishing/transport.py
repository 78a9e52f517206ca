"""How weights reach engines: the `WeightTransport` protocol, and the transport that the settings name.

To replace the weights of an engine, it is paused between two tokens and resumed after the transfer; here through a file
system that trainer and engines share.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, Protocol

import anyio
import anyio.to_thread
import structlog

from stream.errors import EngineError, EngineRefusedError
from workers.engine_api.wire import NEEDS_DIGESTS, WEIGHT_TRANSFER_BACKEND
from workers.settings import Settings
from workers.train.publishing.engine_control import EngineControlClient, PartialUpdateError
from workers.train.publishing.http_transfer import file_manifest


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
    weights = settings.weights
    if settings.publishes_adapters:
        from workers.train.publishing.adapter_update import AdapterUpdate

        yield AdapterTransport(beside=AdapterUpdate(settings.lora.rank), merged=PausedUpdate(SharedFolderTransfer()))
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


log = structlog.get_logger()


class Transfer(Protocol):
    """Moves weights into a paused engine."""

    backend: ClassVar[str]
    """vLLM weight-transfer backend that the engine must run."""
    start_hint: ClassVar[str]
    """What the engine needs besides `--weight-transfer-config`; appended to error messages."""

    async def prepare(self, path: Path) -> None:
        """Prepare a folder for sending."""

    async def transfer(self, engine: EngineControlClient, path: Path, version: int) -> None:
        """Start an update, send the weights, finish the update.

        Raises:
            PartialUpdateError: which weights the engine holds is unknown.
        """


class PausedUpdate:
    """Pauses, transfers and resumes. A `WeightTransport`.

    Args:
        transfer: moves the weights.
        keep_kv_cache: running requests keep the KV cache that old weights computed.
    """

    def __init__(self, transfer: Transfer, *, keep_kv_cache: bool = False) -> None:
        self._transfer = transfer
        self._keep_kv_cache = keep_kv_cache

    async def prepare(self, path: Path) -> None:
        """See `WeightTransport`."""
        await self._transfer.prepare(path)

    async def check(self, engine: EngineControlClient) -> None:
        """See `WeightTransport`."""
        has, needs = await engine.transfer_backend(), self._transfer.backend
        if has is None:
            log.info("engine.backend_unknown", url=engine.url, needs=needs)
        elif has != needs:
            was = f"with backend {has!r}" if has else "without --weight-transfer-config"
            raise EngineRefusedError(
                f"{engine.url} was started {was}; start it with --weight-transfer-config "
                f'\'{{"backend": "{needs}"}}\'{self._transfer.start_hint}'
            )

    async def send(self, engine: EngineControlClient, path: Path, version: int) -> None:
        """See `WeightTransport`. A repeated try pauses again, without a resume in between."""
        await engine.pause(keep_kv_cache=self._keep_kv_cache)
        await self._transfer.transfer(engine, path, version)
        await engine.resume()

    async def abort(self, engine: EngineControlClient, error: Exception) -> None:
        """See `WeightTransport`. An engine whose weights are unknown stays paused."""
        if isinstance(error, PartialUpdateError):
            log.warning("engine.left_paused", url=engine.url, why=str(error))
            return
        try:
            await engine.resume()
        except EngineError as resume_error:
            log.warning("engine.resume_failed", url=engine.url, why=str(resume_error))


class AdapterTransport:
    """Gives each engine adapters in the way that it takes them. A `WeightTransport`.

    Args:
        beside: for engines that serve adapters beside their weights.
        merged: for engines that add an adapter to their weights.
    """

    def __init__(self, *, beside: WeightTransport, merged: WeightTransport) -> None:
        self._beside, self._merged = beside, merged
        self._merging: set[str] = set()
        """URLs of the engines that merge; `check` finds it out."""

    async def prepare(self, path: Path) -> None:
        """Nothing to do: the files are in place."""

    async def check(self, engine: EngineControlClient) -> None:
        """See `WeightTransport`."""
        if await engine.merges_adapters():
            self._merging.add(engine.url)
        else:
            self._merging.discard(engine.url)
            await self._beside.check(engine)

    async def send(self, engine: EngineControlClient, path: Path, version: int) -> None:
        """See `WeightTransport`."""
        await self._of(engine).send(engine, path, version)

    async def abort(self, engine: EngineControlClient, error: Exception) -> None:
        """See `WeightTransport`."""
        await self._of(engine).abort(engine, error)

    def _of(self, engine: EngineControlClient) -> WeightTransport:
        return self._merged if engine.url in self._merging else self._beside


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
