import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.base_models.demo_model import make_model
from tests.base_models.warm_start import warm_start

CONTROL = Path(__file__).parents[1] / "sync_grpo.py"


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_plain_loop_improves_on_the_warm_start(tmp_path):
    make_model(tmp_path, seed=1)
    came_to = warm_start(tmp_path, seed=1, threads=1)
    assert came_to.clean_loss < 0.06, "digits are not copied well"
    command = [sys.executable, str(CONTROL), str(tmp_path), "--steps", "40", "--seed", "1", "--threads", "1"]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=800).stdout
    result = json.loads(output)
    before, after = result["before"], result["after"]
    assert 0.15 <= before["sampled"] <= 0.45
    assert before["turns"] < 2.6
    assert after["sampled"] >= 0.75
    assert after["sampled"] - before["sampled"] >= 0.35
    assert after["turns"] > 2.8
