"""The package that made tests fail is found by halving the list of packages that are newer than locked."""

import pytest

from tests.agents.newest import PACKAGES, program_of, verdict
from tests.newest import find_culprit


@pytest.mark.parametrize("culprits", [{"p3"}, {"p0"}, {"p9"}, {"p0", "p9"}])
def test_the_package_with_which_tests_fail_is_found(culprits):
    packages, runs = [f"p{number}" for number in range(10)], []

    def passes_without(some):
        runs.append(some)
        return culprits <= set(some)

    found = find_culprit(packages, passes_without)
    assert set(found) == culprits if len(culprits) == 1 else culprits <= set(found)
    assert len(runs) <= 8


def test_without_candidates_there_is_no_culprit():
    assert find_culprit([], lambda packages: True) == []


@pytest.mark.parametrize(
    ("test", "program"),
    [
        ("tests/agents/test_programs.py::test_a[langgraph-openai]", "langgraph"),
        ("tests/agents/test_examples.py::test_b[idle-claude_code]", "claude-code"),
        ("tests/agents/test_compaction.py::test_c[opencode]", "opencode"),
        ("tests/agents", ""),
    ],
)
def test_the_program_of_a_test_stands_in_its_id(test, program):
    assert program_of(test) == program


def test_a_program_is_named_if_its_tests_pass_with_the_locked_version():
    failed = ["t[codex]", "u[codex]", "t[opencode]", "t[claude-code]"]
    lines = verdict(failed, ["t[opencode]"], {"codex": "0.171.0 (locked: 0.169.0)"})
    assert lines == [
        "claude-code : t[claude-code]",
        "codex 0.171.0 (locked: 0.169.0): t[codex], u[codex]",
        "fails with the locked versions, too: t[opencode]",
    ]
    assert set(PACKAGES) >= {"codex", "claude-code"}
