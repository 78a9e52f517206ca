"""Jobs for children: what waits, and who waits for it."""

from dataclasses import dataclass, field

import anyio

from envs.call import Outcome
from stream.errors import PenstockError


class ProcessPoolError(PenstockError):
    """A child could not be started, or ended under a job."""


class JobError(Exception):
    """What a job raised in its child; reads as it did there."""


@dataclass(eq=False)
class JobBatch:
    """The jobs that one caller waits for."""

    remaining: int
    done: anyio.Event = field(default_factory=anyio.Event)
    is_cancelled: bool = False


@dataclass(eq=False)
class Job:
    """One of them: bytes for the handler."""

    payload: bytes
    timeout_s: float
    batch: JobBatch
    attempts: int = 0
    """Children that ended under it."""
    outcome: Outcome | None = None

    def finish(self, outcome: Outcome) -> None:
        """This came of it; the first that is said counts."""
        if self.outcome is None:
            self.outcome = outcome
            self.batch.remaining -= 1
            if self.batch.remaining == 0:
                self.batch.done.set()
