"""An installed Penstock beside a project with folders `envs/` and `stream/` of its own, as README of `own_env` says."""

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_env"


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """Return a virtual environment with the wheel; dependencies come from this one, without its editable Penstock."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("penstock", "stream", "envs", "workers"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run([sys.executable, "-m", "build", "--wheel", "--no-isolation", str(source)], check=True)
    (wheel,) = (source / "dist").glob("*.whl")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel], check=True)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "venv" / "bin"


@pytest.fixture
def project(tmp_path) -> Path:
    """Return a copy of the example, with a folder `stream/` of its own."""
    folder = tmp_path / "project"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("runs", "__pycache__", ".pytest_cache"))
    (folder / "stream").mkdir()
    shutil.copy(EXAMPLE / "envs" / "till.py", folder / "stream" / "broker.py")
    return folder


def run(bin_folder: Path, project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(bin_folder / words[0]), *words[1:]], cwd=project, capture_output=True, text=True, check=False, timeout=120
    )


def test_it_is_the_wheel_that_runs(installed, project):
    code = "import stream, envs, workers; print(stream.__file__, envs.__file__, workers.__file__)"
    found = run(installed, project, "python", "-P", "-c", code).stdout.split()
    assert len(found) == 3
    assert all(str(installed.parent) in path for path in found)


@pytest.mark.parametrize("reference", ["envs.till:Till", "envs/till.py:Till", "stream/broker.py:Till"])
def test_an_environment_in_a_folder_with_penstocks_name_is_found(installed, project, reference):
    checked = run(installed, project, "penstock", "check", reference, "--field", "answer=3")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "It is usable: no errors, no warnings." in checked.stdout


def test_a_package_of_penstocks_name_on_the_path_hides_nothing(installed, project, tmp_path, monkeypatch):
    (project / "stream" / "__init__.py").touch()
    assert run(installed, project, "penstock", "algorithms").returncode == 0
    monkeypatch.setenv("PYTHONPATH", str(project))
    checked = run(installed, tmp_path, "penstock", "check", "stream.broker:Till", "--field", "answer=3")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_shipped_files_are_in_the_wheel(installed, project):
    made = run(installed, project, "penstock", "base-model", "runs/demo/model")
    assert made.returncode == 0, made.stderr
    checked = run(installed, project, "penstock", "check", "run.toml")
    assert "rewards.py" not in checked.stderr
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_projects_unit_test_passes(installed, project):
    ran = run(installed, project, "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "3 passed" in ran.stdout
