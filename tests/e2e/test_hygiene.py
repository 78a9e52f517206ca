"""Only the ledger grows with the number of groups in a run: server, processes and files do not (`tests/soak`)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("preloaded")

ROOT = Path(__file__).parents[2]
SEEN = {
    "server": {"memory", "elements", "keys", "aof", "clients"},
    "folder": {"files", "archive"},
    "supervisor": {"rss", "files", "threads"},
    "engine-0": {"rss", "files", "threads"},
    **{
        role: {"rss", "files", "threads", "tasks", "objects"}
        for role in ("feed-0", "rollout-0", "rollout-1", "score-0", "score-1", "train-0")
    },
}


def report(groups: int, limit_s: float, *options: str) -> dict:
    """Run the measurement with `groups` groups and return the report it prints."""
    command = [sys.executable, "-m", "tests.soak.hygiene", "--groups", str(groups), "--limit", str(limit_s), "--json"]
    command += options
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s + 30, check=False)
    assert result.stdout, result.stderr[-3000:]
    output = json.loads(result.stdout)
    assert output["ended"] == groups, f"{output}\n{result.stderr[-3000:]}"
    return output


def flat(groups: int, limit_s: float) -> None:
    """Assert that a run of `groups` groups finishes and no quantity grows beyond its bound."""
    output = report(groups, limit_s)
    assert output["grown"] == [], output
    assert {f"{what}.{kind}" for what, kinds in SEEN.items() for kind in kinds} <= output["quantities"].keys()


@pytest.mark.timeout(200)
def test_resources_do_not_grow_over_a_few_thousand_completions():
    flat(1200, limit_s=160)


@pytest.mark.full
@pytest.mark.timeout(200)
def test_a_leak_of_eight_objects_per_group_in_a_scorer_is_detected():
    output = report(1200, 160, "--leak", "8")
    assert output["grown"] == ["score-0.objects", "score-1.objects"]


@pytest.mark.full
@pytest.mark.timeout(1300)
def test_resources_do_not_grow_over_twenty_thousand_groups():
    flat(20_000, limit_s=1200)
