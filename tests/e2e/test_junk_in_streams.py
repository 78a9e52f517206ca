"""Corrupt entries in every stream of a run become one dead letter each; no role crashes and no prompt is affected.

`tests/soak/foreign_entries.py` adds them; the weights show that each good group was trained once.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("preloaded")


ROOT = Path(__file__).parents[2]


def strewn(entries: int, groups: int, limit_s: float) -> dict:
    command = [sys.executable, "-m", "tests.soak.foreign_entries", "--entries", str(entries), "--groups", str(groups)]
    result = subprocess.run(
        [*command, "--seed", "1", "--limit", str(limit_s), "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=limit_s + 30,
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr[-3000:]}"
    return json.loads(result.stdout)


def is_exact(report: dict, entries: int, groups: int) -> bool:
    ended = report["trained"] + sum(report["dropped"].values()) + report["dead"]
    return (ended, report["lost"], report["twice"], report["restarts"]) == (groups, 0, 0, 0) and (
        report["dead_letters_of_junk"] == entries
    )


@pytest.mark.timeout(150)
def test_a_hundred_junk_entries_become_dead_letters_and_the_run_continues():
    assert is_exact(strewn(100, groups=100, limit_s=110), 100, groups=100)


@pytest.mark.full
@pytest.mark.timeout(1000)
def test_two_thousand_junk_entries_become_dead_letters_and_the_run_continues():
    assert is_exact(strewn(2000, groups=1000, limit_s=900), 2000, groups=1000)
