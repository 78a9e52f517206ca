"""Run a rollout worker that repeats a request until it succeeds: `patient_rollout.py rollout FILE --redis URL ...`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from workers.cli import main
from workers.rollout.engine_client import client

if __name__ == "__main__":
    client.MAX_ATTEMPTS = 1000  # type: ignore[misc]
    main()
