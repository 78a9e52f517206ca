"""Whole weights into an engine that goes on: it is frozen between two tokens, given them, and thaws."""

from pathlib import Path
from typing import ClassVar, Protocol

import structlog

from stream.errors import EngineError, EngineRefusedError
from workers.train.publishing.engine_control import EngineControlClient, PartialUpdateError

log = structlog.get_logger()


class Transfer(Protocol):
    """What brings the weights into an engine that is frozen."""

    backend: ClassVar[str]
    """The weight-transfer backend that the engine needs."""
    start_hint: ClassVar[str]
    """What it needs besides `--weight-transfer-config`, for people."""

    async def prepare(self, path: Path) -> None:
        """Make a folder ready to be sent."""

    async def transfer(self, engine: EngineControlClient, path: Path, version: int) -> None:
        """Start, update, finish.

        Raises:
            PartialUpdateError: nobody knows which weights it has now.
        """


class PausedUpdate:
    """Pause, carry, resume; a `Way`.

    Args:
        transfer: brings the weights.
        keep_kv: requests under way keep the keys and values that old weights have computed.
    """

    def __init__(self, transfer: Transfer, *, keep_kv: bool = False) -> None:
        self._transfer = transfer
        self._keep_kv = keep_kv

    async def prepare(self, path: Path) -> None:
        """See `Way`."""
        await self._transfer.prepare(path)

    async def check(self, engine: EngineControlClient) -> None:
        """See `Way`."""
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
        """See `Way`. A try that failed is begun anew from the pause on, without a resume in between."""
        await engine.pause(keep_kv=self._keep_kv)
        await self._transfer.transfer(engine, path, version)
        await engine.resume()

    async def abort(self, engine: EngineControlClient, error: Exception) -> None:
        """See `Way`."""
        if isinstance(error, PartialUpdateError):
            log.warning("engine.left_paused", url=engine.url, why=str(error))
            return
        try:
            await engine.resume()
        except EngineError as trouble:
            log.warning("engine.resume_failed", url=engine.url, why=str(trouble))
