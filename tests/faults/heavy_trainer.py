"""A trainer with large checkpoints, on a disk that becomes full: `heavy_trainer.py FILE --redis URL --engine URL`."""

import resource
import sys
from functools import partial
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.chaos.witness import Witness
from workers.run.role_process import run_role
from workers.settings import Settings
from workers.train.worker import train

FULL_AFTER = "full_after"
"""A file in the run's folder: the last step after which there is room for a checkpoint."""
_BALLAST = 1 << 18


class Heavy(Witness):
    """A witness with an optimizer's state, which is all that a full disk has no room for."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._full_after = settings.folder / FULL_AFTER

    def state(self) -> dict[str, torch.Tensor]:
        """What it takes room to write."""
        if self._full_after.exists() and self.steps > int(self._full_after.read_text()):
            _soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (_BALLAST, hard))
        return {"ballast": torch.zeros(_BALLAST)}


if __name__ == "__main__":
    file, _, redis, _, engine = sys.argv[1:]
    sys.exit(run_role("train", Path(file), (), redis, (engine,), partial(train, make_learner=Heavy)))
