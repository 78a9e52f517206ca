"""A run from `tool-caller` learns an environment that the model has never seen."""

import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

from workers.demo.base_models import write_base_model

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "base-models.md").read_text()


def test_nine_of_ten_calls_of_unseen_tools_are_valid():
    command = [sys.executable, "-m", "benchmarks.valid_calls", "--json"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    result = json.loads(output)
    print(result)
    assert all(share >= 0.9 for share in result["valid"].values()), result["valid"]


def test_the_thermostat_of_the_page_is_learned(tmp_path):
    write_base_model("tool-caller", tmp_path / "models" / "base")
    (tmp_path / "thermostat.py").write_text(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0])
    table = next(block for block in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL) if "[run]" in block)
    (tmp_path / "run.toml").write_text(table)
    rows = [{"prompt": "Heat the house.", "room": ("kitchen", "bedroom")[i % 2]} for i in range(480)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "penstock", "run", "run.toml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = (tmp_path / "runs").rglob("metrics.jsonl")
    rewards = [json.loads(line)["reward/mean"] for line in file.read_text().splitlines()]
    print(rewards)
    assert mean(rewards[-5:]) >= mean(rewards[:3]) + 0.3, rewards
