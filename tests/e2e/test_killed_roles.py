"""SIGKILL to any role: the run recovers without help, and every prompt is counted exactly once."""

import json
import os
import signal

import pytest

from tests.e2e.harness import assert_all_trained_once, balanced, children, finish, running, wait_for_trained

pytestmark = [pytest.mark.timeout(280), pytest.mark.usefixtures("preloaded")]


@pytest.mark.full
def test_killing_a_rollout_worker_the_scorer_and_the_trainer_loses_nothing(project):
    prompts = 80
    project.prompts(prompts)
    project.table["rollout"]["workers"] = 2
    project.table["filter"] = {"zero_variance": False}
    with running(project) as process:
        for trained, role in ((4, "rollout"), (16, "score"), (28, "train")):
            wait_for_trained(project, trained, process, 120)
            os.kill(children(process.pid)[role], signal.SIGKILL)
        summary = finish(process, project)
    assert_all_trained_once(project, summary, prompts)
    assert summary["completion_states"]["valid"] == prompts * 4


DEADLY = """
import os, signal

def die(number):
    if number in {numbers}:
        {end}

class Deadly:
    def reset(self, number, **row):
        die(number)

def deadly(completions, number, **columns):
    die(number[0])
    return [float(len(text) % 2) for text in completions]
"""
KILL, EXIT = "os.kill(os.getpid(), signal.SIGKILL)", "os._exit(7)"


@pytest.mark.full
@pytest.mark.parametrize(
    ("where", "end", "numbers", "lease_s"),
    [
        pytest.param("environment", EXIT, [5], 3.0, id="an environment that exits"),
        pytest.param("environment", KILL, [5, 6, 9], 15.0, id="an environment that kills its process"),
        pytest.param("reward", KILL, [5], 15.0, id="a reward that kills its process"),
        pytest.param("reward", KILL, [5, 6, 9, 10, 12], 2.0, id="many rows, at a lease of 2 s"),
        pytest.param("reward", EXIT, [5, 6, 9, 10, 12], 2.0, id="many rows that exit, at a lease of 2 s"),
    ],
)
def test_prompts_that_end_their_worker_take_no_other_prompt_with_them(project, where, end, numbers, lease_s):
    (project.folder / "deadly.py").write_text(DEADLY.format(numbers=numbers, end=end))
    if where == "environment":
        project.table["environments"] = {"deadly": f"{project.folder / 'deadly.py'}:Deadly"}
    else:
        project.table["rewards"] = [{"ref": f"{project.folder / 'deadly.py'}:deadly"}]
    project.table["filter"] = {"zero_variance": False}
    project.table["queue"] = {"lease_s": lease_s}
    project.prompts(16)
    ended = project.run("run", str(project.write()), "--no-check")
    summary = json.loads((project.run_folder / "summary.json").read_text())
    assert (summary["fed"], summary["dead"], summary["groups_trained"]) == (16, len(numbers), 16 - len(numbers))
    assert balanced(summary)
    letters = json.loads(project.run("dead", "list", str(project.write()), "--json").stdout)
    assert sorted(int(letter["prompt_id"].rpartition(":")[2]) for letter in letters) == numbers
    named = "environment deadly" if where == "environment" else "reward function deadly"
    for letter in letters:
        assert letter["error"].startswith("7 of its workers in a row died")
        assert named in letter["error"]
    last = ended.stdout.splitlines()[-5:]
    assert any(letter["prompt_id"] in line for letter in letters for line in last)
    assert any(named in line and "7 of its workers" in line for line in last)
    again = project.run("run", str(project.run_folder), timeout=30)
    assert (again.returncode, "has finished" in again.stderr) == (ended.returncode, True), again.stderr


@pytest.mark.full
def test_a_killed_engine_gets_the_current_weights_after_its_restart(project):
    prompts = 60
    project.prompts(prompts)
    project.table["filter"] = {"zero_variance": False}
    with running(project) as process:
        wait_for_trained(project, 8, process, 120)
        os.kill(children(process.pid)["serve"], signal.SIGKILL)
        summary = finish(process, project)
    assert balanced(summary)
    assert summary["groups_trained"] == prompts
    # Requests that the engine failed to answer were neither trained nor scored as answers.
    assert summary["completion_states"] == {"valid": prompts * 4}
    events = [json.loads(line) for line in (project.run_folder / "logs" / "supervisor.log").read_text().splitlines()]
    assert [e["name"] for e in events if e["event"] == "role.restarted"] == ["engine-0"]
