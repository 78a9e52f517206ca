"""`examples/own_env/`: a project with its own folder `envs/`, checked, unit-tested and run as in its README."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import Project, environment, summary_of

pytestmark = pytest.mark.usefixtures("preloaded")

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_env"


@pytest.fixture
def copied(tmp_path, random_model):
    """A copy of the example, so that the tests leave no files in the repository."""
    folder = tmp_path / "own_env"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("runs", "__pycache__", ".pytest_cache"))
    project = Project(tmp_path, random_model)
    project.folder = folder
    return project


def test_penstock_check_accepts_the_project(copied):
    checked = copied.run("check", "envs.till:Till", "--field", "answer=3")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "It is usable: no errors, no warnings." in checked.stdout


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([sys.executable, "-m", "pytest"], marks=pytest.mark.full),  # finds modules where it is started
        [str(Path(sys.executable).parent / "pytest")],
    ],
)
def test_the_projects_unit_test_passes_from_any_folder(copied, command):
    arguments = [*command, "-q", "-p", "no:cacheprovider", "tests"]
    ran = subprocess.run(arguments, cwd=copied.folder, env=environment(), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "3 passed" in ran.stdout


@pytest.mark.full
@pytest.mark.timeout(200)
def test_a_run_trains_on_the_project(copied, random_model):
    overrides = {"model.path": random_model, "train.max_steps": 2, "rollout.group_size": 2, "train.batch_size": 4}
    overrides["filter.zero_variance"] = "false"
    sets = [part for name, value in overrides.items() for part in ("--set", f"{name}={value}")]
    summary = summary_of(copied.run("run", "run.toml", "--json", *sets), copied)
    assert summary["steps"] == 2
    assert summary["completion_states"]["valid"] >= 16
    assert (copied.folder / "runs" / "till" / "ledger.jsonl").exists()
