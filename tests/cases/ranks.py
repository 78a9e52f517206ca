"""Run the ranks of a trainer as processes of a test."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

TESTS = Path(__file__).parents[1]


def run_ranks(script: str, *arguments: str) -> None:
    """Run a script in `tests` that starts ranks, and wait until all of them have succeeded."""
    ranks = subprocess.Popen(
        [sys.executable, str(TESTS / script), *arguments],
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        assert ranks.wait(timeout=200) == 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
