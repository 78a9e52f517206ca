"""`penstock algorithms` lists everything that is registered, with formula and source."""

import json

import pytest
from click.testing import CliRunner

from workers.cli import penstock
from workers.settings.algorithm import PRESETS
from workers.train.algorithms.advantages import ESTIMATORS
from workers.train.algorithms.correction import REJECTIONS
from workers.train.algorithms.losses import LOSSES


def test_json_lists_every_name_with_formula_source_and_defaults():
    result = CliRunner().invoke(penstock, ["algorithms", "--json"])
    assert result.exit_code == 0
    actual = json.loads(result.stdout)
    for kind, registry in (
        ("estimator.name", ESTIMATORS),
        ("loss.name", LOSSES),
        ("correction.reject", REJECTIONS),
    ):
        assert {entry["name"] for entry in actual[kind]} == set(registry)
        assert all(entry["formula"] and entry["source"] for entry in actual[kind])
    (grpo,) = (entry for entry in actual["estimator.name"] if entry["name"] == "grpo")
    assert grpo["options"] == {"normalize_std": True, "leave_one_out": False, "epsilon": 1e-4}
    assert set(actual["correction.preset"]) == set(PRESETS)


@pytest.mark.parametrize("name", sorted({*ESTIMATORS, *LOSSES, *PRESETS}))
def test_every_name_is_printed(name):
    result = CliRunner().invoke(penstock, ["algorithms"])
    assert f"\n  {name} " in result.stdout
