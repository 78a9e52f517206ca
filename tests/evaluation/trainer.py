"""Run the project's trainer with the witness of these runs as its learner: `trainer.py FILE --redis URL ...`."""

import argparse
import sys
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.chaos import witness
from workers.run.role_process import run_role
from workers.train.worker import train


class Witness(witness.Witness):
    """A witness for a model that knows all tokens of the tokenizer."""

    vocab_size = 400


def main() -> int:
    """Run the role; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--redis", required=True)
    parser.add_argument("--engine", action="append", required=True)
    options = parser.parse_args()
    with_witness = partial(train, make_learner=Witness)
    return run_role("train", options.file, (), options.redis, tuple(options.engine), with_witness)


if __name__ == "__main__":
    sys.exit(main())
