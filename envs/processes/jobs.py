"""Jobs for the children of a process pool."""

from dataclasses import dataclass, field

import anyio

from envs.call import Outcome
from stream.errors import PenstockError


class ProcessPoolError(PenstockError):
    """A child could not be started, or ended while it ran a job."""


class JobError(Exception):
    """A job raised in its child; the message holds the original type and text."""


@dataclass(eq=False)
class JobBatch:
    """The jobs of one `ProcessPool.map` call."""

    remaining: int
    done: anyio.Event = field(default_factory=anyio.Event)
    is_cancelled: bool = False


@dataclass(eq=False)
class Job:
    """One job of a batch: bytes for the handler."""

    payload: bytes
    timeout_s: float
    batch: JobBatch
    attempts: int = 0
    """Children that ended while they ran this job."""
    interim: bytes | None = None
    """The last interim result that the job reported, in any child."""
    outcome: Outcome | None = None

    def finish(self, outcome: Outcome) -> None:
        """Set the outcome; only the first call counts."""
        if self.outcome is None:
            self.outcome = outcome
            self.batch.remaining -= 1
            if self.batch.remaining == 0:
                self.batch.done.set()
