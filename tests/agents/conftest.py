"""The agent programs that the tests start, and the figures that they print at the end."""

import os
from collections.abc import Callable

import pytest

from envs.sandboxes.bubblewrap import sandbox_problem
from tests.agents.played import FOLDER

FIGURES = pytest.StashKey[list[str]]()


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
def measured(request) -> Callable[[object], None]:
    """Record a figure that is printed at the end, after success as well."""
    result = request.config.stash.setdefault(FIGURES, [])
    return lambda figure: result.append(f"{request.node.name}: {figure}")


def pytest_terminal_summary(terminalreporter, config) -> None:
    """Print the recorded figures."""
    if figures := config.stash.get(FIGURES, []):
        terminalreporter.section("measured on agent programs")
        for figure in figures:
            terminalreporter.line(figure)
