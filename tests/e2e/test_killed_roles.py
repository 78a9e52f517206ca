"""SIGKILL to any role: the run recovers without help, and every prompt is counted exactly once."""

import json
import os
import signal

import pytest

from tests.e2e.harness import assert_all_trained_once, balanced, children, finish, running, summary_of, wait_for_trained

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
import os

class Deadly:
    def reset(self, number, **row):
        if number == 5:
            os._exit(7)
"""


@pytest.mark.full
def test_a_prompt_that_ends_its_worker_takes_no_other_prompt_with_it(project):
    (project.folder / "deadly.py").write_text(DEADLY)
    project.table["environments"] = {"deadly": f"{project.folder / 'deadly.py'}:Deadly"}
    project.table["filter"] = {"zero_variance": False}
    project.table["queue"] = {"lease_s": 11.0}  # three deaths within 10 s of the start would end the run
    project.prompts(16)
    summary = summary_of(project.run("run", str(project.write()), "--json"), project)
    assert (summary["fed"], summary["groups_trained"], summary["dead"]) == (16, 15, 1)
    assert balanced(summary)
    (dead,) = json.loads(project.run("dead", "list", str(project.write()), "--json").stdout)
    assert dead["prompt_id"].endswith(":5")


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
