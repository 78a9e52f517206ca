"""`penstock compare`: metrics of runs side by side, from their folders alone."""

import json

import pytest
from click.testing import CliRunner

from stream.errors import PenstockError
from workers.cli import penstock
from workers.commands.compare import compare_runs


@pytest.fixture
def runs(tmp_path):
    """Two runs, of 30 and 20 steps, whose reward grows by 1 and by 2 per step."""
    folders = [tmp_path / "one", tmp_path / "tw\x1bo"]
    for folder, steps, slope in zip(folders, (30, 20), (1.0, 2.0), strict=True):
        folder.mkdir()
        rows = [{"step": step, "reward/mean": slope * step, "loss": 0.5} for step in range(1, steps + 1)]
        rows[-1] |= {"eval/mean/all": 3.0} if slope == 1 else {"kl/k1": None, "loss": "odd"}
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 9')
    return folders


def test_runs_are_compared_over_the_same_steps(runs):
    found = compare_runs(runs, None, 10, ["reward/*", "loss"])
    assert (found.step, found.steps, found.last_steps) == (20, 10, [30, 20])
    assert found.metrics == {"reward/mean": [15.5, 31.0], "loss": [0.5, 0.5]}
    assert compare_runs(runs, 5, 1, ["reward/mean"]).metrics == {"reward/mean": [5.0, 10.0]}


def test_a_metric_that_one_run_lacks_has_no_value(runs):
    found = compare_runs(runs, 30, 10, ["eval/*", "reward/mean"])
    assert found.metrics == {"eval/mean/all": [3.0, None], "reward/mean": [25.5, None]}


def test_an_unknown_metric_or_an_empty_run_is_an_error(runs, tmp_path):
    with pytest.raises(PenstockError, match="no metric is named nothing in steps 11 to 20 of these runs"):
        compare_runs(runs, None, 10, ["nothing"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(PenstockError, match="has no step yet"):
        compare_runs([runs[0], tmp_path / "empty"], None, 10, ["loss"])


def test_the_table_has_the_difference_and_escaped_names(runs):
    arguments = ["compare", *map(str, runs), "--metric", "reward/mean"]
    output = CliRunner().invoke(penstock, arguments).stdout
    head, row, last = output.splitlines()
    assert head.split() == ["metric", "one", "tw\\x1bo", "difference"]
    assert row.split() == ["reward/mean", "15.5", "31", "+15.5"]
    assert last == "means over 10 steps up to step 20; last steps: one 30, tw\\x1bo 20"
    assert json.loads(CliRunner().invoke(penstock, [*arguments, "--json"]).stdout)["step"] == 20
    alone = CliRunner().invoke(penstock, ["compare", str(runs[0])])
    assert "name two runs or more" in alone.output
