"""User code that wears out a worker, blocks its event loop, or cannot be verified, in whole runs."""

import json

import pytest

from tests.e2e.harness import balanced, summary_of

pytestmark = [pytest.mark.full, pytest.mark.timeout(240)]

OLD_WORKER = """
from envs.call import abandoned_threads

for _ in range(60):  # 4 more, and the worker is recycled
    abandoned_threads.add()
"""
WORLDS = '''
import asyncio
import time


class Hangs:
    """Hangs the thread of every reset of a few prompts."""

    def reset(self, number, **row):
        if number in (2, 6):
            time.sleep(3600)

    def get_reward(self):
        return float(time.perf_counter_ns() % 7)


class Blocks:
    """Holds the event loop for longer than its own deadline and than the lease, with one prompt, once."""

    async def reset(self, number, **row):
        if number == 3:
            try:
                open("blocked", "x").close()
            except FileExistsError:
                return
            time.sleep(8)

    async def get_reward(self):
        return float(time.perf_counter_ns() % 7)


class Uncancellable:
    """Never hears that it is cancelled."""

    async def reset(self, number, **row):
        while number in (2, 6):
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                pass

    async def get_reward(self):
        return float(time.perf_counter_ns() % 7)
'''
REWARDS = """
import time

def farmed(completions, number):
    "A verifier that the policy can make hang: by what it says, here on most prompts."
    if number[0] % 3:
        time.sleep(3600)
    return [1.0]
"""


@pytest.fixture
def world(project):
    """Return a function that selects the environment of the run by name."""
    (project.folder / "worlds.py").write_text(WORLDS)

    def use(name, **rollout):
        project.table["environments"] = {"world": f"{project.folder / 'worlds.py'}:{name}"}
        del project.table["rewards"]
        project.table["filter"] = {"zero_variance": False}
        project.table["rollout"] |= rollout
        return project

    return use


def audited(project):
    result = project.run("audit", str(project.run_folder), "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout)


def log_lines(project, role, event):
    lines = (project.run_folder / "logs" / f"{role}.log").read_text().splitlines()
    results = [json.loads(line) for line in lines if line.startswith("{")]
    return [line for line in results if line["event"] == event]


def test_a_worker_with_too_many_hung_threads_is_recycled_and_the_run_finishes(world):
    project = world("Hangs", call_timeout_s=0.5)
    file = project.folder / "worlds.py"
    file.write_text(OLD_WORKER + file.read_text())
    summary = summary_of(project.run("run", str(project.write()), "--json"), project)
    assert summary["fed"] == 10
    assert summary["completion_states"]["failed:env_reset"] == 8
    assert summary["completion_states"]["valid"] == 32
    assert summary["dead"] == summary["outstanding"] == 0
    assert balanced(summary)
    worn = log_lines(project, "rollout-0", "worker.recycle_requested")
    assert len(worn) in (1, 2)
    assert all("64 threads hang" in line["why"] for line in worn)
    assert len(log_lines(project, "rollout-0", "role.started")) == 1 + len(worn)  # and it never crashed
    result = audited(project)
    assert (result["lost"], result["twice"]) == ([], [])


def test_an_event_loop_blocked_for_longer_than_a_lease_loses_nothing_and_is_logged(world):
    project = world("Blocks", call_timeout_s=1.0, workers=2)
    summary = summary_of(project.run("run", str(project.write()), "--json"), project)
    assert summary["fed"] == 10
    assert summary["dead"] == summary["outstanding"] == 0
    assert (
        summary["completion_states"]["valid"] >= 39
    )  # a completion that blocked the loop beyond its deadline counts as timed out
    assert sum(summary["completion_states"].values()) == 40
    assert balanced(summary)
    held = [line for n in (0, 1) for line in log_lines(project, f"rollout-{n}", "event_loop.blocked")]
    assert [line["by"].rpartition(" ")[2] for line in held] == ["Blocks.reset"]
    result = audited(project)
    assert (result["lost"], result["twice"]) == ([], [])


def test_coroutines_that_ignore_cancellation_fail_only_their_completions(world):
    project = world("Uncancellable", call_timeout_s=0.5)
    summary = summary_of(project.run("run", str(project.write()), "--json"), project)
    assert summary["completion_states"] == {"failed:env_reset": 8, "valid": 32}
    assert summary["dead"] == summary["outstanding"] == 0
    assert log_lines(project, "rollout-0", "call.cancellation_ignored")
    result = audited(project)
    assert (result["lost"], result["twice"]) == ([], [])


def test_a_policy_that_makes_the_verifier_time_out_stops_the_run_with_the_reason(project):
    (project.folder / "farmed.py").write_text(REWARDS)
    ref = f"{project.folder / 'farmed.py'}:farmed"
    project.table["rewards"] = [{"ref": ref, "processes": 4, "granularity": "row", "timeout_s": 0.2}]
    project.table["train"] |= {"batch_size": 2}  # so that a window of 8 groups decides
    project.table["filter"] = {"zero_variance": False}
    project.prompts(40)
    result = project.run("run", str(project.write()), "--json")
    assert result.returncode != 0
    output = next(line for line in result.stderr.splitlines() if line.startswith("error: "))
    assert "reward:timeout" in output
    assert "abort.max_invalid_fraction" in output
    assert "fix the reward function, or raise the limit" in output
    actual = audited(project)
    assert (actual["lost"], actual["twice"]) == ([], [])
