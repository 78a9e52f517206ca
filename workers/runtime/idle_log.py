"""Log lines for workers without work."""

import structlog

from stream.connection.run_connection import MAX_BLOCK_S
from stream.queue.stage import Claim

log = structlog.get_logger()


class IdleLogger:
    """Logs one line when a worker has waited long for entries of a stage, and one when it has work again.

    Short waits are normal in a healthy run and are not logged.
    """

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._waited_s = 0.0
        self._logged = False

    def add_wait(self, seconds: float, claim: Claim) -> None:
        """Add to the waiting time; `claim` is the claim that returned nothing."""
        self._waited_s += seconds
        if self._logged or self._waited_s < MAX_BLOCK_S:
            return
        self._logged = True
        log.info(
            "work.waiting",
            stage=self._stage,
            unfinished_prompts=claim.unfinished_prompts,
            feed_done=claim.feed_done,
            paused=claim.paused,
        )

    def end_wait(self) -> None:
        """Note that there is work."""
        if self._logged:
            log.info("work.available", stage=self._stage)
        self._waited_s, self._logged = 0.0, False
