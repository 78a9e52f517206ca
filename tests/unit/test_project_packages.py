"""A project with its own folders `stream/`, `envs/` and `workers/`: joined to ours, or refused by name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = ("stream", "envs", "workers")
MODULE_OF_OURS = {"stream": "records", "envs": "messages", "workers": "settings"}
ENVIRONMENT = (
    "class Env:\n    def reset(self, **row):\n        return 'go'\n    def get_reward(self):\n        return 1.0\n"
)
COMMAND = ("-m", "penstock", "check")
PYTHON = ("-c", "import sys, penstock; report = penstock.check(sys.argv[1]); print(report); sys.exit(not report.ok)")


def start(way, ref: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *way, ref]
    wide = os.environ | {"COLUMNS": "400"}  # a path is not broken into lines
    return subprocess.run(command, cwd=folder, env=wide, capture_output=True, text=True, timeout=60, check=False)


def said(started: subprocess.CompletedProcess[str]) -> str:
    return started.stdout + started.stderr


@pytest.fixture(params=NAMES)
def name(request) -> str:
    return request.param


@pytest.fixture(params=[COMMAND, PYTHON], ids=["command", "Python"])
def way(request):
    return request.param


@pytest.fixture
def project(tmp_path, name):
    def write(text: str, module: str = "my_own_game") -> Path:
        file = tmp_path / name / f"{module}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        return tmp_path

    return write


def test_a_module_that_only_the_project_has_is_found(project, name, way):
    folder = project(ENVIRONMENT)
    started = start(way, f"{name}.my_own_game:Env", folder)
    assert started.returncode == 0, started.stderr


def test_modules_of_the_project_import_one_another(project, name, way):
    folder = project(f"from {name}.my_own_game import Env\n", "entrance")
    project(ENVIRONMENT)
    started = start(way, f"{name}/entrance.py:Env", folder)
    assert started.returncode == 0, started.stderr


def test_a_module_that_both_have_is_refused_by_name(project, name, way):
    folder = project(ENVIRONMENT, MODULE_OF_OURS[name])
    started = start(way, f"{name}.{MODULE_OF_OURS[name]}:Env", folder)
    assert started.returncode != 0
    assert f"Penstock has a module {name}.{MODULE_OF_OURS[name]}, too" in said(started)
    assert "rename the folder, or write the file: path/to/file.py:Name" in said(started)


def test_code_in_the_projects_init_is_refused_by_name(project, name, way):
    folder = project(ENVIRONMENT)
    project('"""Games."""\n\nREGISTRY = {}\n', "__init__")
    started = start(way, f"{name}.my_own_game:Env", folder)
    assert started.returncode != 0
    assert "__init__.py, line 3, has code, which would never run" in said(started)


def test_an_import_that_code_in_the_projects_init_prevents_is_explained(project, name, way):
    folder = project("REGISTRY = {}\n", "__init__")
    project(ENVIRONMENT)
    (folder / "game.py").write_text(f"from {name}.my_own_game import Env\n")
    started = start(way, "game.py:Env", folder)
    assert started.returncode != 0
    assert "has code, which would never run" in said(started)


def test_a_file_is_loaded_whatever_its_folder_is_called(project, name, way):
    folder = project(ENVIRONMENT, MODULE_OF_OURS[name])
    project("REGISTRY = {}\n", "__init__")
    started = start(way, f"{name}/{MODULE_OF_OURS[name]}.py:Env", folder)
    assert started.returncode == 0, started.stderr


def test_a_package_of_our_name_that_was_imported_first_is_reported(project, name):
    folder = project(ENVIRONMENT)
    (folder / name / "__init__.py").touch()
    started = start(("-c", f"import sys; sys.path.insert(0, '.'); import {name}; import penstock"), "", folder)
    assert f"the package {name!r} of {folder / name} was imported before penstock" in started.stderr
