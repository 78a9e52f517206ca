"""A project with its own folders `stream/`, `envs/` and `workers/`: joined to ours, or refused by name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MODULES_OF_OURS = {"stream": "records", "envs": "messages", "workers": "settings"}
ENVIRONMENT = (
    "class Env:\n    def reset(self, **row):\n        return 'go'\n    def get_reward(self):\n        return 1.0\n"
)
CHECKS = """
import json, sys, penstock
reports = [penstock.check(ref) for ref in sys.argv[1:]]
print(json.dumps([(report.ok, str(report)) for report in reports]))
"""


def run_python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    wide = os.environ | {"COLUMNS": "400"}  # a path is not broken into lines
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=wide, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture(params=["command", "Python"])
def checked(request, tmp_path):
    """Check a reference for each of the names: whether it is usable, and what is said about it.

    A start takes seconds of a core. So one process checks all of them from Python, and the command checks one.
    """

    def check(ref: str) -> dict[str, tuple[bool, str]]:
        refs = {name: ref.format(name=name, ours=ours) for name, ours in MODULES_OF_OURS.items()}
        if request.param == "command":
            ran = run_python(tmp_path, "-m", "penstock", "check", refs["workers"])
            return {"workers": (ran.returncode == 0, ran.stdout + ran.stderr)}
        ran = run_python(tmp_path, "-c", CHECKS, *refs.values())
        return dict(zip(refs, json.loads(ran.stdout), strict=True))

    return check


@pytest.fixture
def write(tmp_path):
    """Write a module of this text into each of the project's folders; `{ours}` is the name of a module of ours."""

    def write(text: str, module: str = "my_own_game") -> None:
        for name, ours in MODULES_OF_OURS.items():
            file = tmp_path / name / f"{module.format(ours=ours)}.py"
            file.parent.mkdir(exist_ok=True)
            file.write_text(text.replace("{name}", name))

    return write


def test_a_module_that_only_the_project_has_is_found(write, checked):
    write(ENVIRONMENT)
    for ok, text in checked("{name}.my_own_game:Env").values():
        assert ok, text


def test_modules_of_the_project_import_one_another(write, checked):
    write("from {name}.my_own_game import Env\n", "entrance")
    write(ENVIRONMENT)
    for ok, text in checked("{name}/entrance.py:Env").values():
        assert ok, text


def test_a_module_that_both_have_is_refused_by_name(write, checked):
    write(ENVIRONMENT, "{ours}")
    for name, (ok, text) in checked("{name}.{ours}:Env").items():
        assert not ok
        assert f"Penstock has a module {name}.{MODULES_OF_OURS[name]}, too" in text
        assert "rename the folder, or write the file: path/to/file.py:Name" in text


def test_code_in_the_projects_init_is_refused_by_name(write, checked):
    write(ENVIRONMENT)
    write('"""Games."""\n\nREGISTRY = {}\n', "__init__")
    for ok, text in checked("{name}.my_own_game:Env").values():
        assert not ok
        assert "__init__.py, line 3, has code, which would never run" in text


def test_an_import_that_code_in_the_projects_init_prevents_is_explained(write, checked, tmp_path):
    write("REGISTRY = {}\n", "__init__")
    write(ENVIRONMENT)
    for name in MODULES_OF_OURS:
        (tmp_path / f"game_of_{name}.py").write_text(f"from {name}.my_own_game import Env\n")
    for ok, text in checked("game_of_{name}.py:Env").values():
        assert not ok
        assert "has code, which would never run" in text


def test_a_file_is_loaded_whatever_its_folder_is_called(write, checked):
    write(ENVIRONMENT, "{ours}")
    write("REGISTRY = {}\n", "__init__")
    for ok, text in checked("{name}/{ours}.py:Env").values():
        assert ok, text


def test_packages_of_our_names_that_were_imported_first_are_reported(write, tmp_path):
    write("", "__init__")
    code = """
import importlib, sys; sys.path.insert(0, '.')
for name in ('stream', 'envs', 'workers'):
    importlib.import_module(name)
    try: import penstock
    except ImportError as error: print(error)
    del sys.modules[name]
"""
    lines = run_python(tmp_path, "-c", code).stdout.splitlines()
    for line, name in zip(lines, MODULES_OF_OURS, strict=True):
        assert f"the package {name!r} of {tmp_path / name} was imported before penstock" in line
