"""`penstock play` with a model folder: it starts an engine of its own."""

import json
import subprocess
import sys

import pytest

from workers.demo.base_models import write_base_model

pytestmark = pytest.mark.usefixtures("preloaded")


def test_a_single_episode_is_played_although_no_run_could_train_groups_of_one(tmp_path):
    write_base_model("tool-caller", tmp_path / "model")
    command = [sys.executable, "-m", "penstock", "play", "guess", "--policy", "model", "-n", "1", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=55, check=False)
    assert done.stderr.count("error") == 0, done.stderr
    (completion,) = json.loads(done.stdout)["completions"]
    assert completion["turns"] >= 1
