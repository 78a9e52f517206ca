"""`penstock run` from a prompt file to a checkpoint, with every role in a separate process."""

import json
import shutil

import pytest

from tests.e2e.harness import balanced, summary_of

pytestmark = [pytest.mark.timeout(200), pytest.mark.usefixtures("preloaded")]


EMPTY = {"role": "user", "content": ""}
PARITY = """
class Parity:
    def reset(self, number, completion_index, **row):
        self.n = number + completion_index
        return 'Even or odd?'

    def get_reward(self):
        return float(self.n % 2)
"""


def test_every_prompt_ends_once_and_rerunning_a_finished_run_does_nothing(project):
    """The project has its own folder `envs/`. Some lines of its file hold no prompt, and two are equal."""
    (project.folder / "envs").mkdir()
    (project.folder / "envs" / "parity.py").write_text(PARITY)
    project.table |= {"environments": {"parity": "envs.parity:Parity"}, "rewards": []}
    empty = [[], {"number": 3}, {}, {"prompt": ""}, {"prompt": " "}, {"prompt": []}, {"prompt": [EMPTY, EMPTY]}]
    lines = ['{"prompt": ', *map(json.dumps, empty), "", " ", *[json.dumps({"prompt": "Say 1.", "number": 1})] * 2]
    project.prompts(8, extra="\n".join(lines))
    summary = summary_of(project.run("run", str(project.write()), "--json"), project)
    assert summary["fed"] == summary["groups_trained"] == 10
    assert summary["rejected_rows"] == 1 + len(empty)
    assert summary["steps"] == 3  # 4 + 4 + 2
    assert summary["outstanding"] == summary["dead"] == summary["duplicates"] == 0
    assert balanced(summary)
    assert summary["completion_states"] == {"valid": 40}
    assert summary["tokens_per_second"] > 0
    records = project.ledger()
    assert sorted(line["prompt"] for line in records) == sorted({line["prompt"] for line in records})  # equal rows too
    assert {line["outcome"] for line in records} == {"trained"}
    assert json.loads((project.run_folder / "summary.json").read_text()) == summary
    log = (project.run_folder / "logs" / "feed-0.log").read_text()
    for line in range(9, 15):
        assert f"prompts.jsonl:{line}" in log, log

    again = summary_of(project.run("run", str(project.run_folder / "run.toml"), "--json"), project)
    for key in ("fed", "groups_trained", "groups_dropped", "steps", "completion_states", "rejected_rows"):
        assert again[key] == summary[key], key
    assert project.ledger() == records


def test_unmeasured_rewards_are_counted_by_reason_and_do_not_affect_other_completions(project):
    (project.folder / "moody.py").write_text(
        "import zlib\n\n\n"
        "class Moody:\n"
        "    def reset(self, number, completion_index, **row):\n"
        "        self.n = number + completion_index\n"
        "    def get_reward(self):\n"
        "        if self.n % 5 == 0:\n"
        "            return None\n"
        "        if self.n % 7 == 0:\n"
        "            raise RuntimeError('the grader crashed')\n"
        "        if self.n % 11 == 0:\n"
        "            return float('nan')\n"
        "        return float(self.n % 2)\n"
    )
    prompts, size = 20, 8
    project.prompts(prompts)
    project.table |= {"environments": {"moody": f"{project.folder / 'moody.py'}:Moody"}, "rewards": []}
    project.table["rollout"]["group_size"] = size
    project.table["abort"] = {"max_invalid_fraction": 0.5}
    summary = summary_of(project.run("run", str(project.write()), "--json"), project)
    expected = {"valid": 0, "reward:missing": 0, "reward:raised": 0, "reward:not_finite": 0}
    for p in range(prompts):
        for i in range(size):
            n = p + i
            reason = next((r for d, r in ((5, "missing"), (7, "raised"), (11, "not_finite")) if n % d == 0), None)
            expected[f"reward:{reason}" if reason else "valid"] += 1
    assert summary["completion_states"] == expected
    assert balanced(summary)
    assert summary["groups_trained"] + sum(summary["groups_dropped"].values()) == prompts


def test_a_group_without_any_measured_reward_shows_in_the_figures_of_a_step(project):
    (project.folder / "silent.py").write_text(
        "def silent(completions, number):\n"
        "    return [None if n == 3 else float(i % 2) for i, n in enumerate(number)]\n"
    )
    project.prompts(9)  # eight to train on, so that the last step is a smaller one, after all groups have come
    project.table |= {"rewards": [{"ref": f"{project.folder / 'silent.py'}:silent"}]}
    project.table["train"]["batch_size"] = 3
    project.table["abort"] = {"max_invalid_fraction": 1.0}
    summary = summary_of(project.run("run", str(project.write()), "--json"), project)
    assert summary["completion_states"] == {"valid": 32, "reward:missing": 4}
    assert summary["groups_dropped"] == {"no_valid_row": 1}
    steps = [json.loads(line) for line in (project.run_folder / "metrics.jsonl").read_text().splitlines()]
    assert sum(step.get("rows/reward:missing", 0) for step in steps) == 4
    assert sum(step["rows/valid"] for step in steps) == 32
    assert min(step["valid_fraction"] for step in steps) < 1


def test_an_environment_that_draws_its_tasks_at_random_is_named_before_the_run_and_in_it(project):
    (project.folder / "dice.py").write_text(
        "import random\n\n\n"
        "class Dice:\n"
        "    def reset(self, **row):\n"
        "        self.n = random.randrange(10)\n"
        "        return f'Say {self.n}.'\n"
        "    def get_reward(self):\n"
        "        return self.n / 10\n"
    )
    project.prompts(8)
    project.table |= {"environments": {"dice": f"{project.folder / 'dice.py'}:Dice"}, "rewards": []}
    done = project.run("run", str(project.write()), "--json")
    summary = summary_of(done, project)
    assert "warning: environment dice (environments.dice): reset returned 'Say " in done.stderr
    assert summary["totals"]["compared_prompts"] == 8
    assert summary["totals"]["different_prompts"] == 8
    warnings = [json.loads(line) for line in (project.run_folder / "warnings.jsonl").read_text().splitlines()]
    assert [each["text"][:9] for each in warnings if each["name"] == "different_tasks"] == ["in 4 of t"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train": {"learning_speed": 1}}, ["train.learning_speed", "learning_rate"]),
        ({"rollout": {"group_size": "eight"}}, ["rollout.group_size", "int"]),
        ({"run": {"redis": "redis://127.0.0.1:1/0"}, "queue": {"reconnect_timeout_s": 1.0}}, ["127.0.0.1:1"]),
        ({"environments": {"e": "no_such_environment"}}, ["no_such_environment", "entry point", "calculator"]),
        ({"model": {"path": "nowhere"}}, ["nowhere"]),
        ({"data": {"path": "nothing.jsonl"}}, ["nothing.jsonl"]),
    ],
    ids=["unknown key", "wrong type", "unreachable redis", "no such factory", "no model", "no data"],
)
def test_invalid_input_is_a_clear_error(project, change, words):
    project.table |= change
    result = project.run("run", str(project.write()), "--json", timeout=90)
    assert result.returncode != 0
    for word in words:
        assert word in result.stderr, result.stderr
    assert "Traceback" not in result.stderr
    if result.stdout:  # the preflight found it, so nothing was started
        assert json.loads(result.stdout)["preflight"]["findings"]
    assert not (project.run_folder / "logs").exists()


@pytest.mark.full
def test_a_run_on_an_emptied_server_is_rebuilt_from_its_ledger(project):
    first = summary_of(project.run("run", str(project.write()), "--json"), project)
    ledger = project.ledger()
    shutil.rmtree(project.run_folder / "redis")
    again = summary_of(project.run("run", str(project.run_folder / "run.toml"), "--json"), project)
    for key in ("fed", "groups_trained", "groups_dropped", "steps", "completion_states", "outstanding"):
        assert again[key] == first[key], key
    assert project.ledger() == ledger
