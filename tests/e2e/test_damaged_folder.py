"""One damaged file in a stopped run's folder loses nothing, whichever it is (`tests/soak/damaged_folder.py`)."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("which", [("--every-file",), ("--faults", "500")], ids=["one in every file", "500 at random"])
def test_a_run_with_a_damaged_file_is_resumed_or_refused_by_name(which):
    command = [
        sys.executable,
        "-m",
        "tests.soak.damaged_folder",
        *which,
        "--groups",
        "60",
        "--seed",
        str(int(time.time())),
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=7000, check=False)
    assert result.returncode == 0, f"{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
