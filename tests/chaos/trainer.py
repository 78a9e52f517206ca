"""Run the project's trainer with a witness as its learner: `trainer.py FILE --redis URL --engine URL`."""

import argparse
import sys
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.chaos.witness import Witness
from workers.launch.role_process import ROLE_MAINS, run_role
from workers.train.worker import train


def main() -> int:
    """Run the role; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--redis", default="")
    parser.add_argument("--engine", action="append", required=True)
    options = parser.parse_args()
    ROLE_MAINS["train"] = lambda: partial(train, make_learner=Witness)
    return run_role("train", options.file, (), options.redis, tuple(options.engine))


if __name__ == "__main__":
    sys.exit(main())
