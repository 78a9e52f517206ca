"""`pacing.stale_policy = "cancel"`: cancel attempts that newer policies made too old, and start them again."""

import structlog

from stream.queue.lease import Lease
from stream.queue.stage import Stage, watch_versions

log = structlog.get_logger()

MAX_CANCELLATIONS = 2
"""Per prompt; after that the prompt is finished, however old it gets."""


def should_cancel(claimed_version: int, version: int, max_staleness: int, cancellations: int) -> bool:
    """Return whether to cancel an attempt.

    Args:
        claimed_version: policy version when the attempt started.
        version: newest policy version.
        max_staleness: allowed difference of the two.
        cancellations: earlier attempts at the same prompt that were cancelled.
    """
    return version - claimed_version > max_staleness and cancellations < MAX_CANCELLATIONS


class StaleCanceller:
    """Cancels attempts of one worker as soon as they are too old, which also aborts their requests at the engines.

    Args:
        stage: with the worker's leases.
        max_staleness: policy versions that an attempt may be behind.
    """

    def __init__(self, stage: Stage, max_staleness: int) -> None:
        self._stage = stage
        self._max_staleness = max_staleness
        self.version = -1
        """The newest published version; -1 unless `watch` runs."""

    async def watch(self) -> None:
        """Check every lease at each new version; runs forever."""
        async for version in watch_versions(self._stage.connection):
            self.version = version
            for lease in list(self._stage.leases.values()):
                self.cancel_if_stale(lease)

    def cancel_if_stale(self, lease: Lease) -> None:
        """Cancel one attempt if it is too old. Call it when work starts: a version may be newer than the claim."""
        if should_cancel(lease.claimed_version, self.version, self._max_staleness, len(lease.cancelled_attempts_s)):
            log.info(
                "attempt.cancelled", prompt=lease.prompt_id, claimed_version=lease.claimed_version, version=self.version
            )
            lease.cancel_stale()
