"""Whole weights into an engine that goes on: it is frozen between two tokens, given them, and thaws."""

from pathlib import Path
from typing import ClassVar, Protocol

import structlog

from stream.errors import EngineError, EngineRefusedError
from workers.train.publishing.control import Control, HalfDoneError

log = structlog.get_logger()


class Carrier(Protocol):
    """What brings the weights into an engine that is frozen."""

    backend: ClassVar[str]
    """The weight-transfer backend that the engine needs."""
    remedy: ClassVar[str]
    """What it needs besides `--weight-transfer-config`, for people."""

    async def prepare(self, path: Path) -> None:
        """Make a folder ready to be sent."""

    async def carry(self, engine: Control, path: Path, version: int) -> None:
        """Start, update, finish.

        Raises:
            HalfDoneError: nobody knows which weights it has now.
        """


class InFlight:
    """Pause, carry, resume; a `Way`.

    Args:
        carrier: brings the weights.
        keep_kv: requests under way keep the keys and values that old weights have computed.
    """

    def __init__(self, carrier: Carrier, *, keep_kv: bool = False) -> None:
        self._carrier = carrier
        self._keep_kv = keep_kv

    async def prepare(self, path: Path) -> None:
        """See `Way`."""
        await self._carrier.prepare(path)

    async def check(self, engine: Control) -> None:
        """See `Way`."""
        has, needs = await engine.backend(), self._carrier.backend
        if has is None:
            log.info("engine.backend_unknown", url=engine.url, needs=needs)
        elif has != needs:
            was = f"with backend {has!r}" if has else "without --weight-transfer-config"
            raise EngineRefusedError(
                f"{engine.url} was started {was}; start it with --weight-transfer-config "
                f'\'{{"backend": "{needs}"}}\'{self._carrier.remedy}'
            )

    async def give(self, engine: Control, path: Path, version: int) -> None:
        """See `Way`. A try that failed is begun anew from the pause on, without a resume in between."""
        await engine.pause(keep_kv=self._keep_kv)
        await self._carrier.carry(engine, path, version)
        await engine.resume()

    async def let_go(self, engine: Control, error: Exception) -> None:
        """See `Way`."""
        if isinstance(error, HalfDoneError):
            log.warning("engine.left_paused", url=engine.url, why=str(error))
            return
        try:
            await engine.resume()
        except EngineError as trouble:
            log.warning("engine.resume_failed", url=engine.url, why=str(trouble))
