"""The mutants of `tests/mutants`: each applies to this tree exactly once, and the tests that it names exist."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.run import load

ROOT = Path(__file__).parents[2]
MUTANTS = load()


def test_every_area_has_mutants():
    rooms = Counter(mutant.room for mutant in MUTANTS)
    assert sum(rooms.values()) >= 80
    assert min(rooms.values()) >= 5


def test_names_of_mutants_are_unique():
    names = Counter(mutant.name for mutant in MUTANTS)
    assert [name for name, count in names.items() if count > 1] == []


def test_no_mutant_fails_for_a_name_or_a_bracket(tmp_path):
    """A fault that cannot be compiled, or reads a name that does not exist, would be caught by any test."""
    for mutant in MUTANTS:
        text = (ROOT / mutant.file).read_text().replace(mutant.before, mutant.after)
        (tmp_path / f"{mutant.name}{Path(mutant.file).suffix}").write_text(text)
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821,E9", "--output-format", "concise"]
    found = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_mutant_applies_exactly_once_and_its_tests_exist(mutant):
    assert mutant.problem() == ""
    for test in mutant.tests:
        path, _, name = test.partition("::")
        if name:
            function = name.rpartition("::")[2].partition("[")[0]
            assert re.search(rf"def {function}\(", (ROOT / path).read_text()), f"{path} has no {function}"
