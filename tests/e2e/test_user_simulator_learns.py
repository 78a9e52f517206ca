"""examples/user_simulator: a policy learns from a simulated user, with the local engine."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from workers.demo.base_models import write_base_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "user_simulator"


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_policy_learns_to_sell(tmp_path):
    shutil.copytree(EXAMPLE, tmp_path / "sale")
    write_base_model("calculator", tmp_path / "sale" / "model")
    command = [sys.executable, "-m", "penstock", "run", "run.toml"]
    done = subprocess.run(command, cwd=tmp_path / "sale", capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = (tmp_path / "sale").rglob("metrics.jsonl")
    rewards = [json.loads(line)["reward/mean"] for line in file.read_text().splitlines()]
    results = [json.loads(line)["overall"] for line in file.with_name("eval.jsonl").read_text().splitlines()]
    assert [result["prompts"] for result in results] == [40] * len(results)
    assert results[-1]["mean_valid"] > results[0]["mean_valid"] + 0.1, results
    assert rewards[0] < 0.7, rewards
    assert max(rewards[-4:]) > 0.8, rewards
