"""`penstock init` and the JSON schema of the settings file."""

import json
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema
import pytest

from stream.errors import SettingsError
from workers.demo.new_project import write_project
from workers.settings import Settings
from workers.settings.toml_file import load_settings

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "workers" / "settings" / "settings.schema.json").read_text())
EXAMPLES = [path for path in ROOT.glob("examples/*/*.toml") if "[model]" in path.read_text()]


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("new") / "project"
    write_project(folder)
    return folder


def problems(text: str) -> list[str]:
    return [error.message for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(tomllib.loads(text))]


def test_its_own_test_passes(project):
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=project, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_its_settings_are_valid_and_name_the_schema(project):
    text = (project / "run.toml").read_text()
    assert text.splitlines()[0] == "#:schema settings.schema.json"
    assert json.loads((project / "settings.schema.json").read_text()) == SCHEMA
    assert problems(text) == []
    assert isinstance(load_settings(project / "run.toml"), Settings)
    assert (project / load_settings(project / "run.toml").model.path / "model.safetensors").is_file()


def test_its_readme_has_ten_lines_at_most(project):
    assert len((project / "README.md").read_text().splitlines()) <= 10


def test_nothing_is_replaced(project, tmp_path):
    (tmp_path / "rewards.py").write_text("mine = 1\n")
    with pytest.raises(SettingsError, match=r"rewards\.py exists already; name a new folder"):
        write_project(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["rewards.py"]


def test_the_schema_is_that_of_the_settings():
    made = runpy.run_path(str(ROOT / "docs" / "settings_schema.py"))["schema"]()
    assert json.loads(json.dumps(made)) == SCHEMA, "run `make reference`"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_schema_accepts_the_examples(path):
    assert problems(path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    ["train = { batch_sise = 3 }", "train = { batch_size = 0 }", 'estimator = { name = "grpoo" }', "rewards = {}"],
)
def test_the_schema_refuses_what_the_settings_refuse(line, tmp_path):
    text = f'model = {{ path = "m" }}\n{line}\n'
    assert problems(text)
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(SettingsError):
        load_settings(tmp_path / "run.toml")


def test_the_schema_accepts_options_of_the_default_estimator():
    assert problems('model = { path = "m" }\nestimator = { normalize_std = false }\n') == []
