"""Estimators that bring something with them, from a prompt file to a checkpoint."""

import json

import pytest

from tests.e2e.harness import balanced, summary_of

pytestmark = [pytest.mark.timeout(200), pytest.mark.usefixtures("preloaded")]

BY_TURN = '''
import zlib


class Talker:
    """One tool, which the model may never call; a reward for each of its turns."""

    def reset(self, number, completion_index, **row):
        self.n = number + completion_index

    def more(self) -> str:
        """Say more."""
        return "more"

    def get_reward(self, messages):
        turns = [m for m in messages if m["role"] == "assistant"]
        return [zlib.crc32(str(turn["content"]).encode()) % 5 / 4 for turn in turns]
'''


def metrics(project):
    return [json.loads(line) for line in (project.run_folder / "metrics.jsonl").read_text().splitlines()]


def test_remax_samples_one_greedy_completion_more_and_trains_against_it(project):
    project.table |= {"estimator": {"name": "remax"}}
    summary = summary_of(project.run("run", str(project.write()), "--json"), project)
    assert balanced(summary)
    # Every group of four is trained, tied or not: the greedy one is the baseline, and never among them.
    assert (summary["groups_trained"], summary["completion_states"]) == (10, {"valid": 40})


def test_a_group_whose_greedy_completion_nobody_measured_is_dropped_by_name(project):
    (project.folder / "moody.py").write_text(
        "class Moody:\n"
        "    def reset(self, completion_index, **row):\n"
        "        self.index = completion_index\n"
        "    def get_reward(self):\n"
        "        return None if self.index == 4 else float(self.index % 2)\n"
    )
    project.table |= {
        "estimator": {"name": "remax"},
        "environments": {"moody": f"{project.folder / 'moody.py'}:Moody"},
        "rewards": [],
        "abort": {"max_invalid_fraction": 0.5},
    }
    summary = summary_of(project.run("run", str(project.write()), "--json"), project)
    assert (summary["groups_trained"], summary["groups_dropped"]) == (0, {"no_baseline": 10})


@pytest.mark.full
def test_gae_trains_a_critic_on_rewards_by_turn_and_a_resumed_run_still_has_it(project):
    (project.folder / "talker.py").write_text(BY_TURN)
    project.table |= {
        "estimator": {"name": "gae"},
        "environments": {"talker": f"{project.folder / 'talker.py'}:Talker"},
        "rewards": [],
    }
    project.table["train"] |= {"max_steps": 2, "save_every": 1}
    file = str(project.write())
    summary = summary_of(project.run("run", file, "--json"), project)
    assert summary["steps"] == 2
    assert summary["completion_states"] == {"valid": 32}
    project.table["train"]["max_steps"] = 0
    summary = summary_of(project.run("run", str(project.write()), "--json"), project)
    assert balanced(summary)
    assert (summary["groups_trained"], summary["steps"]) == (40 // 4, 3)
    losses = [line["value/error"] for line in metrics(project)]
    assert len(losses) == 3
    assert all(loss > 0 for loss in losses)


def test_groups_that_rollout_correction_rejects_end_by_name_and_a_run_of_nothing_else_says_so(project):
    """The engine's log-probs are the trainer's; a rule that wants them twice as large rejects every token."""
    project.table["correction"] = {"reject": {"token_k1": [2.0, 3.0]}}
    project.table["filter"] = {"zero_variance": False}
    result = project.run("run", str(project.write()), "--json")
    assert result.returncode == 1
    assert "not one of the run's 40 completions was valid (rejected:token_k1 40)" in result.stderr
    assert {line["outcome"] for line in project.ledger()} == {"dropped:no_valid_row"}
    assert len(project.ledger()) == 10
