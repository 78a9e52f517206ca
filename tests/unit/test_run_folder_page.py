"""docs/run-folder.md names every key of the run's files, as the code has them."""

import ast
import runpy
from pathlib import Path

import pytest

from stream.records import TrainedCompletion, TrainedRow
from stream.trainer import ledger
from workers.runs.metrics_file import _GROUPS, _NAMES
from workers.runs.summary import RunSummary
from workers.runs.tokens import TokenColumns
from workers.settings.training import Tracker
from workers.train.algorithms import correction_metrics
from workers.train.step.step_metrics import STEP_METRICS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "run-folder.md").read_text()


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_every_metric_has_a_unit_and_is_on_the_page():
    table = runpy.run_path(str(ROOT / "docs" / "metrics_table.py"))
    assert set(table["UNITS"]) == set(table["METRICS"]) > set(STEP_METRICS)
    assert table["metrics_table"]() in PAGE, "run `python docs/metrics_table.py` and paste its output"


def test_every_metric_of_the_correction_is_on_the_page():
    tree = ast.parse(Path(correction_metrics.__file__).read_text())
    keys = {
        key.value
        for function in tree.body
        if isinstance(function, ast.FunctionDef) and function.name in ("policy_metrics", "weight_metrics")
        for node in ast.walk(function)
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant)
    }
    assert len(keys) > 20
    assert [key for key in sorted(keys) if f"`{key}`" not in section("metrics.jsonl")] == []


@pytest.mark.parametrize(
    ("title", "keys"),
    [
        ("summary.json", RunSummary.__struct_fields__),
        ("ledger.jsonl", ledger.LedgerRecord.__struct_fields__),
        ("Trackers", Tracker.__args__),
        ("trained_tokens", TrainedCompletion.__struct_fields__ + TrainedRow.__struct_fields__),
        ("Reading completions", TokenColumns.__struct_fields__),
    ],
)
def test_every_key_is_in_its_section(title, keys):
    assert [key for key in keys if f"`{key}`" not in section(title)] == []


def test_the_dashboard_draws_metrics_that_exist():
    derived = ("held_out/", "truncated_share/", "invalid_share/", "tool_error_share")
    metrics = [metric for plans in _GROUPS.values() for plan in plans for metric in plan.lines.values()]
    drawn = [_NAMES.get(metric, (metric,))[0] for metric in metrics if not metric.startswith(derived)]
    assert runpy.run_path(str(ROOT / "docs" / "metrics_table.py"))["undocumented"](drawn) == []
