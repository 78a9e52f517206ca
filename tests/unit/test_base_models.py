"""The shipped base models."""

import fnmatch
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_data_file_of_a_package_is_part_of_the_wheel():
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    patterns = [f"{package}/{pattern}" for package, globs in table.items() for pattern in globs]
    listed = subprocess.run(
        ["git", "ls-files", *table], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    data = [name for name in listed if not name.endswith((".py", "README.md"))]
    assert any(name.startswith("workers/base_models/calculator/") for name in data)
    assert [name for name in data if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)] == []
