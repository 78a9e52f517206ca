"""The locked versions in requirements/: what `make setup`, `make demo` and the images install."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
SETS = ("dev", "local", "light", "train", "reasoning-gym", "pip")
TORCH = "torch"


def locked(name: str) -> dict[str, dict[str, set[str]]]:
    """Return name -> version -> hashes; a package has several versions if the newest does not run everywhere."""
    result: dict[str, dict[str, set[str]]] = {}
    for block in re.split(r"\n(?=\S)", (ROOT / "requirements" / f"{name}.lock").read_text()):
        package, version = re.match(r"([a-z0-9._-]+)==([^\s;]+)", block).groups()
        result.setdefault(package, {})[version] = set(re.findall(r"sha256:[0-9a-f]{64}", block))
    return result


def direct() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    requirements = map(Requirement, [*project["dependencies"], *extras])
    wanted = {str(requirement): requirement for requirement in requirements}
    return [requirement for requirement in wanted.values() if requirement.name not in {"penstock", TORCH}]


@pytest.mark.parametrize("requirement", direct(), ids=str)
def test_every_dependency_is_locked_at_a_version_that_is_permitted(requirement):
    name = re.sub(r"[-_.]+", "-", requirement.name).lower()
    versions = locked("all").get(name)
    assert versions, f"{name} is not locked; run `make lock`"
    assert all(requirement.specifier.contains(version) for version in versions), "run `make lock`"


@pytest.mark.parametrize("name", SETS)
def test_a_set_has_the_versions_and_hashes_of_the_whole_lock(name):
    every, result = locked("all"), locked(name)
    assert result
    for package, versions in result.items():
        assert versions.items() <= every[package].items(), f"{package} in {name}.lock; run `make lock`"
        assert all(versions.values()), f"{package} has no hash"


def test_the_builds_of_torch_are_in_no_lock():
    """Their hashes differ between the build for CPUs and the one for CUDA, whose libraries are gigabytes."""
    names = {package for name in ("all", *SETS, "oldest") for package in locked(name)}
    assert not [name for name in names if name == TORCH or name.startswith(("nvidia-", "triton"))]


def test_no_lock_names_an_index():
    for file in (ROOT / "requirements").iterdir():
        assert "://" not in file.read_text(), f"{file.name} names a server; another index could not be used"
