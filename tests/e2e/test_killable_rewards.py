"""A reward function that hangs, dies or prints megabytes: its rows are invalid with a reason, others unaffected."""

from pathlib import Path

import pytest

from tests.e2e.harness import balanced, summary_of

pytestmark = [pytest.mark.timeout(200), pytest.mark.full]

REWARDS = """
import os, signal, zlib

def fragile(completions, number):
    (n,), (text,) = number, completions
    print("x" * 1_000_000)
    if n == 3:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True: pass
    if n == 6:
        os._exit(1)
    return [float(zlib.crc32(text.encode()) % 2)]
"""


def test_a_run_survives_a_reward_function_that_hangs_and_crashes(project):
    (project.folder / "fragile.py").write_text(REWARDS)
    ref = f"{project.folder / 'fragile.py'}:fragile"
    project.table["rewards"] = [{"ref": ref, "processes": 2, "granularity": "row", "timeout_s": 0.5}]
    project.table["score"] = {"workers": 2}
    project.table["filter"] = {"zero_variance": False}
    summary = summary_of(project.run("run", str(project.write()), "--json"), project)
    assert summary["completion_states"] == {"valid": 32, "reward:timeout": 4, "reward:raised": 4}
    assert summary["groups_trained"] == 8
    assert sum(summary["groups_dropped"].values()) == 2
    assert summary["dead"] == summary["duplicates"] == 0
    assert balanced(summary)
    assert [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(project.folder).encode() in read(path)] == []


def read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""
