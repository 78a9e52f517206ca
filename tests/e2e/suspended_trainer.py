"""Run a trainer whose learner is a witness that stops at one point, until the other end of a pipe is opened.

`suspended_trainer.py FILE POINT FIFO --redis URL --engine URL`, where POINT is `step:N` (step trained, nothing
recorded yet), `weights:N` or `model:N` (the weights of a version, or of a checkpoint, are written but not yet renamed
to their final name).
"""

import argparse
import sys
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from torch import Tensor

from tests.chaos.witness import Witness
from workers.launch.role_process import ROLE_MAINS, run_role
from workers.settings import Settings
from workers.train.step.batch import Batch
from workers.train.step.step_metrics import StepReport
from workers.train.worker import train


class Stopping(Witness):
    """A witness that blocks once, at its configured point."""

    def __init__(self, settings: Settings, *, point: str, fifo: Path) -> None:
        super().__init__(settings)
        self._point, self._fifo = point, fifo

    def step(self, batch: Batch, version: int, **dropped: object) -> StepReport:
        """Train on one batch."""
        report = super().step(batch, version, **dropped)
        self._stop("step", self.steps)
        return report

    def write_copy(self, folder: Path, counts: Tensor, steps: int) -> None:
        """Write the weights of a step into an existing folder."""
        super().write_copy(folder, counts, steps)
        self._stop("model" if folder.name == "model" else "weights", steps)

    def _stop(self, what: str, step: int) -> None:
        if f"{what}:{step}" == self._point:
            self._fifo.read_bytes()


def main() -> int:
    """Run the role; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("point")
    parser.add_argument("fifo", type=Path)
    parser.add_argument("--redis", required=True)
    parser.add_argument("--engine", required=True)
    options = parser.parse_args()
    stopping = partial(Stopping, point=options.point, fifo=options.fifo)
    ROLE_MAINS["train"] = lambda: partial(train, make_learner=stopping)
    return run_role("train", options.file, (), options.redis, (options.engine,))


if __name__ == "__main__":
    sys.exit(main())
