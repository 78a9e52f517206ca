"""Every fault in `docs/delivery.md` names a test that exists, or states that there is none yet."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "delivery.md"
NAMED = re.compile(r"(\*long:\* )?`(tests/[\w/]+\.py)::(\w+)`")


def rows() -> list[list[str]]:
    """Return the cells of every row of the page's tables of faults, without the headers."""
    faults = PAGE.read_text().split("## Faults of a run\n")[1]
    lines = [line for line in faults.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "fault"]


@cache
def defined_in(path: str) -> dict[str, bool]:
    """Return the names of the tests in a file; the value is True for tests that `make test` skips."""
    tree = ast.parse((ROOT / path).read_text())
    defined = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {node.name: "pytest.mark.full" in map(ast.unparse, node.decorator_list) for node in defined}


def test_every_row_names_existing_tests_or_states_that_there_are_none_yet():
    for fault, *_, shown in rows():
        named = NAMED.findall(shown)
        assert named or "not yet" in shown, fault
        # Every string that looks like a test's name must be parsed as one, or it would go unchecked.
        assert shown.count("::") == len(named), fault
        for long, path, test in named:
            assert test.startswith("test_"), test
            assert (ROOT / path).is_file(), path
            assert test in defined_in(path), f"{path} has no {test}"
            assert bool(long) == defined_in(path)[test], f"{path}::{test}: long, or not?"


def test_the_page_has_rows_and_tests():
    assert len(rows()) > 30
    assert all(len(row) == 4 for row in rows())
    assert sum(len(NAMED.findall(row[-1])) for row in rows()) > 80
