"""Estimators that need more than the group's rewards, from a prompt file to a checkpoint."""

import json
import runpy
from pathlib import Path

import pytest

from tests.e2e.harness import balanced, summary_of
from workers.runs.groups import ArchivedRunGroups

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


def test_remax_trains_against_a_greedy_completion_and_drops_groups_whose_greedy_reward_is_unmeasured(project):
    (project.folder / "moody.py").write_text(
        "class Moody:\n"
        "    def reset(self, number, completion_index, **row):\n"
        "        self.number, self.index = number, completion_index\n"
        "    def get_reward(self):\n"
        "        return None if self.index == 4 and self.number % 2 else float(self.index % 2)\n"
    )
    project.table |= {
        "estimator": {"name": "remax"},
        "environments": {"moody": f"{project.folder / 'moody.py'}:Moody"},
        "rewards": [],
        "abort": {"max_invalid_fraction": 0.5},
    }
    summary = summary_of(project.run("run", str(project.write()), "--json"), project)
    assert balanced(summary)
    # The baseline is a fifth, greedy completion, which no count includes.
    assert (summary["groups_trained"], summary["groups_dropped"]) == (5, {"no_baseline": 5})
    assert summary["completion_states"] == {"valid": 40}
    table = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "metrics_table.py"))
    assert table["undocumented"]({key for step in metrics(project) for key in step}) == []
    _check_archived_advantages(ArchivedRunGroups(project.run_folder))


def _check_archived_advantages(archived):
    """The archive has the advantages that the trainer used: the reward minus that of the greedy completion."""
    trained = [each for each in archived.completions() if each.outcome == "trained"]
    baselines = {each.group.prompt.id: each.reward for each in trained if each.completion.greedy}
    others = [each for each in trained if not each.completion.greedy]
    assert (len(baselines), len(others)) == (5, 20)
    for each in others:
        assert each.trained.state == "valid"
        assert each.trained.loss_tokens == sum(row.sampled_count for row in each.completion.rows)
        assert each.trained.advantage == pytest.approx(each.reward - baselines[each.group.prompt.id])
    assert {each.trained for each in trained if each.completion.greedy} == {None}


def test_a_run_that_trained_nothing_fails_with_the_reason(project):
    """Half of the rewards are unmeasured; a correction rule rejects all tokens of the other half.

    The engine's log-probs equal the trainer's, and the rule demands a ratio of about two.
    """
    (project.folder / "rewards.py").write_text(
        "def by_chance(completions, number, **columns):\n"
        "    if number[0] % 2:\n"
        "        raise OSError('no grader')\n"
        "    return [float(i) for i in range(len(completions))]\n"
    )
    project.table["correction"] = {"reject": {"token_k1": [2.0, 3.0]}}
    project.table["abort"] = {"max_invalid_fraction": 0.9}
    result = project.run("run", str(project.write()), "--json")
    assert result.returncode == 1
    assert "not one of the run's 40 completions was valid (rejected:token_k1 20, reward:raised 20)" in result.stderr
    summary = json.loads(result.stdout)
    assert balanced(summary)
    assert summary["groups_dropped"] == {"no_valid_row": 10}
    assert {line["outcome"] for line in project.ledger()} == {"dropped:no_valid_row"}
    assert len(project.ledger()) == 10


@pytest.mark.full
def test_gae_trains_a_critic_on_turn_rewards_and_a_resumed_run_keeps_it(project):
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
