"""What a release consists of besides code: one version, complete metadata, files for visitors of the repository."""

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_there_is_one_version():
    plugin = tomllib.loads((ROOT / "plugins" / "vllm" / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {plugin["version"], citation["version"]} == {PROJECT["version"]}
    assert citation["license"] == PROJECT["license"]


def test_the_metadata_are_complete():
    assert {"description", "readme", "license", "license-files", "authors", "keywords", "classifiers"} <= PROJECT.keys()
    assert (ROOT / PROJECT["readme"]).exists()
    assert all((ROOT / name).exists() for name in PROJECT["license-files"])
    minimum = PROJECT["requires-python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {minimum}" in PROJECT["classifiers"]


def test_issue_templates_are_forms():
    folder = ROOT / ".github" / "ISSUE_TEMPLATE"
    forms = [yaml.safe_load(file.read_text()) for file in sorted(folder.glob("*.yml")) if file.name != "config.yml"]
    assert len(forms) >= 2
    for form in forms:
        assert {"name", "description", "body"} <= form.keys()
        ids = [field["id"] for field in form["body"] if field["type"] != "markdown"]
        assert len(ids) == len(set(ids)) >= 3


def test_links_of_the_forms_lead_to_files():
    for file in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        for target in re.findall(r"\]\(\.\./blob/main/([^)]+)\)", file.read_text()):
            assert (ROOT / target).exists(), target
