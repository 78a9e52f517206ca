"""Run the project's trainer with the witness of these runs as its learner: `trainer.py FILE --redis URL ...`."""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.chaos import witness
from workers.launch.role_process import ROLE_MAINS, run_role
from workers.settings import AbortSettings
from workers.train.worker import train

WAIT_S = "TRAINER_WAIT_S"
"""Environment variable: seconds for which the trainer waits for an evaluation without progress."""


class Witness(witness.Witness):
    """A witness for a model that knows all tokens of the tokenizer."""

    vocab_size = 400


def main() -> int:
    """Run the role; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--redis", default="")
    parser.add_argument("--engine", action="append", required=True)
    options = parser.parse_args()
    if wait_s := os.environ.get(WAIT_S):
        AbortSettings.trainer_wait_s = float(wait_s)  # type: ignore[assignment,method-assign]
    ROLE_MAINS["train"] = lambda: partial(train, make_learner=Witness)
    return run_role("train", options.file, (), options.redis, tuple(options.engine))


if __name__ == "__main__":
    sys.exit(main())
