"""The estimator of `docs/training.md` in a clone: its function, options and loop are added, tested, and listed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.reader import Reader
from tests.pages import ROOT, blocks_of

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

PAGE = ROOT / "docs" / "training.md"


def add(clone: Path, text: str, before: str) -> None:
    """Write a block to the end of the file that the sentence before it names; its imports replace equal ones."""
    file = clone / re.findall(r"`([\w/]+\.py)`", before)[-1]
    old = file.read_text()
    code = re.sub(r"^from .*\n+", "", text, flags=re.MULTILINE)
    if (union := re.search(r"^Estimator = \(\n", old, re.MULTILINE)) is not None:
        (name,) = re.findall(r"^class (\w+)", code, re.MULTILINE)
        old = f"{old[: union.start()]}{code}\n\n{union[0]}    {name}\n    | {old[union.end() :].lstrip()}"
        code = ""
    file.write_text(f"{old}\n\n{code}" if code else old)


def test_the_pages_estimator_passes_the_property_tests_and_is_in_the_reference(tmp_path):
    clone = tmp_path / "penstock"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    (clone / ".venv").symlink_to(Path(sys.executable).parents[1])
    os.utime(clone / "pyproject.toml", (0, 0))  # older than the virtual environment: `make` installs nothing
    for block in blocks_of(PAGE, "python"):
        add(clone, block.text, block.before)
    (commands,) = blocks_of(PAGE, "sh")
    reader = Reader(clone, logs=tmp_path)
    reader.variables["PYTHONPATH"] = str(clone)  # the virtual environment has the packages of another folder
    printed = reader.type(commands.text, 600)
    assert re.search(r"\d\d passed", printed), printed
    changed = subprocess.run(["git", "diff", "docs"], cwd=clone, capture_output=True, text=True, check=True).stdout
    assert changed.count("optimistic") >= 2
    removed = [line for line in changed.splitlines() if re.match(r"-(?!--)", line)]
    assert len(removed) <= 5, "the reference lost lines"
