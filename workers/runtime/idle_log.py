"""Says what a worker waits for, where it has waited for long."""

import structlog

from stream.connection.run_connection import MAX_BLOCK_S
from stream.queue.stage import Claim

log = structlog.get_logger()


class IdleLogger:
    """A time without work in one stage: one line when it has become long, and one when it is over.

    Short waits are a healthy run's usual state, and are not worth a word.
    """

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._waited_s = 0.0
        self._logged = False

    def add_wait(self, seconds: float, claim: Claim) -> None:
        """Note that it lasted so much longer."""
        self._waited_s += seconds
        if self._logged or self._waited_s < MAX_BLOCK_S:
            return
        self._logged = True
        log.info(
            "work.waiting",
            stage=self._stage,
            open_prompts=claim.unfinished_prompts,
            feed_done=claim.feed_done,
            paused=claim.paused,
        )

    def end_wait(self) -> None:
        """Note that there is work."""
        if self._logged:
            log.info("work.available", stage=self._stage)
        self._waited_s, self._logged = 0.0, False
