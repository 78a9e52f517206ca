"""The reason why a run ends."""

import anyio
import structlog

from stream.errors import RunFailedError

log = structlog.get_logger()


class RunEnding:
    """Records the first reason to end a run: its work is done, an operator stopped it, or it failed."""

    def __init__(self) -> None:
        self.requested = anyio.Event()
        """Set by the first reason."""
        self.failure: RunFailedError | None = None
        self.interrupted = False
        """A signal or `penstock stop` came before any other reason."""

    def finish(self) -> None:
        """End the run because its work is done."""
        self.requested.set()

    def interrupt(self) -> None:
        """End the run because an operator stopped it."""
        self.interrupted = self.interrupted or not self.requested.is_set()
        self.requested.set()

    def fail(self, error: RunFailedError) -> None:
        """End the run because of an error. Later errors are ignored: they follow from the first."""
        if self.failure is None:
            log.error("run.failed", error=str(error))
            self.failure = error
        self.requested.set()
