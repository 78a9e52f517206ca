"""The code of the guides works as printed: an environment, reward functions, and the tests of both."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import environment
from tests.pages import ROOT, blocks_of

pytestmark = pytest.mark.full

DOCS = ROOT / "docs"


def blocks(page: str) -> list[str]:
    return [block.text for block in blocks_of(DOCS / page, "python")]


@pytest.fixture
def project(tmp_path) -> Path:
    """Return a folder with the files that the guides tell the reader to write."""
    (tmp_path / "envs").mkdir()
    till, test_of_till, *_ = blocks("environments.md")
    (tmp_path / "envs" / "till.py").write_text(till)
    (tmp_path / "test_till.py").write_text(test_of_till)
    (tmp_path / "rewards.py").write_text("\n".join(blocks("rewards.md")))
    coffee, *_, mended = blocks("first-hour.md")
    (tmp_path / "coffee.py").write_text(coffee[: coffee.index(mended.partition("(")[0])] + mended)
    (tmp_path / "test_coffee.py").write_text(*blocks("watching.md"))
    return tmp_path


def run(project: Path, *command: str) -> str:
    ran = subprocess.run(command, cwd=project, env=environment(), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_tests_of_the_guides_pass(project):
    pytest_command = str(Path(sys.executable).parent / "pytest")
    assert "2 passed" in run(project, pytest_command, "-q", "-p", "no:cacheprovider", "test_till.py", "test_coffee.py")


@pytest.mark.parametrize("name", ["exact", "solved", "quality", "thrift"])
def test_the_reward_functions_of_the_guide_are_usable(project, name):
    penstock = str(Path(sys.executable).parent / "penstock")
    more = ["--env", "envs.till:Till"] if name == "thrift" else []
    assert "It is usable: no errors" in run(
        project, penstock, "check", f"rewards.py:{name}", "--field", "answer=3", *more
    )
