"""Whole weights: pause the engine between two tokens, transfer the weights, resume."""

from pathlib import Path
from typing import ClassVar, Protocol

import structlog

from stream.errors import EngineError, EngineRefusedError
from workers.train.publishing.engine_control import EngineControlClient, PartialUpdateError

log = structlog.get_logger()


class Transfer(Protocol):
    """Moves whole weights into a paused engine."""

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
