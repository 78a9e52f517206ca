"""`pacing.stale_policy = "cancel"`: what newer policies have overtaken is cancelled, at the engine too, and begun anew."""

import structlog

from stream.queue.stage import Lease, Stage
from stream.queue.versions import watch_versions

log = structlog.get_logger()

MAX_CANCELLATIONS = 2
"""One prompt is cancelled so often; then it is finished, however old it gets."""


def should_cancel(start_version: int, version: int, max_staleness: int, cancellations: int) -> bool:
    """Whether an attempt is to be cancelled.

    Args:
        start_version: the policy version that it was begun with.
        version: the policy version now.
        max_staleness: versions that it may be behind.
        cancellations: attempts at the same prompt that were cancelled before.
    """
    return version - start_version > max_staleness and cancellations < MAX_CANCELLATIONS


class StaleCanceller:
    """Cancels what a worker holds the moment it is overtaken.

    Args:
        stage: with the worker's leases.
        max_staleness: versions that an attempt may be behind.
    """

    def __init__(self, stage: Stage, max_staleness: int) -> None:
        self._stage = stage
        self._max_staleness = max_staleness
        self.version = -1
        """The newest version heard of; -1 where nobody watches."""

    async def watch(self) -> None:
        """Hear of each version, for ever; run it beside the work."""
        async for version in watch_versions(self._stage.connection):
            self.version = version
            for lease in list(self._stage.leases.values()):
                self.cancel_if_stale(lease)

    def cancel_if_stale(self, lease: Lease) -> None:
        """Cancel this one if it is overtaken: call it when the work begins, for what was published since the claim."""
        if should_cancel(lease.claimed_version, self.version, self._max_staleness, len(lease.cancelled_attempts_s)):
            log.info("attempt.cancelled", prompt=lease.prompt_id, begun=lease.claimed_version, version=self.version)
            lease.cancel_stale()
