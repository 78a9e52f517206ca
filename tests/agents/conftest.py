"""The agent programs that the tests start, and the figures that they print at the end."""

import os
from collections.abc import Callable

import pytest

from envs.sandboxes.bubblewrap import sandbox_problem
from tests.agents.played import FOLDER

FIGURE = "measured"
"""Property of a report: a figure to print at the end. Reports come from other processes, too (`pytest -n`)."""


@pytest.fixture(autouse=True)
def programs(monkeypatch) -> None:
    """Put the programs on the PATH. Without them or a sandbox, skip; in CI, fail."""
    missing = "" if list(FOLDER.glob("ready-*")) else "the programs are not installed: make test-agents needs npm"
    missing = missing or (f"this machine makes no sandboxes: {problem}" if (problem := sandbox_problem()) else "")
    if missing and os.environ.get("CI"):
        pytest.fail(missing)
    if missing:
        pytest.skip(missing)
    folders = [FOLDER / "node_modules" / ".bin", FOLDER / "venv" / "bin"]
    monkeypatch.setenv("PATH", os.pathsep.join([*map(str, folders), os.environ["PATH"]]))


@pytest.fixture
def measured(record_property) -> Callable[[object], None]:
    """Record a figure that is printed at the end, after success as well."""
    return lambda figure: record_property(FIGURE, str(figure))


def pytest_terminal_summary(terminalreporter) -> None:
    """Print the recorded figures."""
    reports = [each for name in ("passed", "failed") for each in terminalreporter.stats.get(name, ())]
    figures = [(each.nodeid, value) for each in reports for key, value in each.user_properties if key == FIGURE]
    if figures:
        terminalreporter.section("measured on agent programs")
        for test, figure in figures:
            terminalreporter.line(f"{test.rpartition('::')[2]}: {figure}")
