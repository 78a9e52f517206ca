"""Run a trainer with large checkpoints on a disk that fills up: `heavy_trainer.py FILE --redis URL --engine URL`."""

import resource
import sys
from functools import partial
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.chaos.witness import Witness
from workers.launch.role_process import ROLE_MAINS, run_role
from workers.settings import Settings
from workers.train.worker import train

FULL_AFTER = "full_after"
"""File in the run's folder: the last step whose checkpoint still finds space."""
_BALLAST = 1 << 18


class Heavy(Witness):
    """A witness with an optimizer state, the only thing that does not fit on the full disk."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._full_after = settings.folder / FULL_AFTER

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state that needs disk space."""
        if self._full_after.exists() and self.steps > int(self._full_after.read_text()):
            _soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (_BALLAST, hard))
        return {"ballast": torch.zeros(_BALLAST)}


if __name__ == "__main__":
    file, _, redis, _, engine = sys.argv[1:]
    ROLE_MAINS["train"] = lambda: partial(train, make_learner=Heavy)
    sys.exit(run_role("train", Path(file), (), redis, (engine,)))
