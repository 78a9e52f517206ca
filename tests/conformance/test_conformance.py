"""The conformance file passes, and the runner tells what does not."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import cases
from tests.conformance.run import main

FILE = Path(__file__).with_name("advantages.json")
ROOT = Path(__file__).parents[2]
HELD = cases.read(FILE)


@pytest.fixture
def altered(tmp_path: Path) -> Callable[..., Path]:
    """A copy of the file with one family alone (and what its cases speak of), after a change."""

    def alter(family: str, change: Callable[[Any], None]) -> Path:
        held = copy.deepcopy({name: value for name, value in HELD.items() if name == family or name not in FAMILIES})
        change(held)
        path = tmp_path / "altered.json"
        path.write_text(json.dumps(held), encoding="utf-8")
        return path

    return alter


FAMILIES = cases.families_of(HELD)

pytestmark = pytest.mark.usefixtures("preloaded")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_case_of_the_family_passes(family):
    result = cases.cases_of(HELD, family)
    failed = {case.id: differences for case in result if (differences := cases.run(case))}
    assert result
    assert not failed


def test_all_280_cases_of_seventeen_families_are_run():
    assert len(FAMILIES) == 17
    assert set(FAMILIES) == set(cases.FAMILIES)
    assert sum(len(cases.cases_of(HELD, family)) for family in FAMILIES) == 280


def test_the_command_prints_one_line_per_family_and_a_total(altered):
    path = altered("pass_at_k", lambda held: held.update(kl=HELD["kl"]))  # the others take a while
    done = subprocess.run(
        [sys.executable, "tests/conformance/run.py", str(path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert {line.split(":")[0] for line in lines} == {"kl", "pass_at_k", "total"}
    assert lines[-1].split() == ["total:", f"{len(HELD['kl']) + len(HELD['pass_at_k'])}/0"]
    assert len({len(line.rpartition("/")[0]) for line in lines}) == 1


@pytest.mark.parametrize(
    ("family", "number", "where", "field"),
    [
        ("group_advantages", 1, ("expected", 0), "expected"),
        ("token_advantages", 0, ("expected_returns_masked", 1, 0), "expected_returns_masked"),
        ("whitening", 0, ("expected_masked", 0, 1), "expected_masked"),
        ("gdpo", 0, ("expected", 2), "expected"),
        ("policy_losses", 0, ("expected_loss",), "expected_loss"),
        ("policy_losses", 0, ("expected_grad_log_prob", 0, 2), "expected_grad_log_prob"),
        ("policy_losses", 0, ("expected_metrics", "actor/ppo_kl"), "expected_metrics.actor/ppo_kl"),
        ("value_losses", 1, ("clipfrac",), "clipfrac"),
        ("kl", 0, ("expected_grad", 1), "expected_grad"),
        ("rollout_correction", 0, ("expected_weights_masked", 0, 0), "expected_weights_masked"),
        ("rollout_correction", 8, ("expected_mask", 1, 1), "expected_mask"),
        ("pass_at_k", 5, ("expected",), "expected"),
        ("field_cases", 2, ("expected_row_advantage", 0), "expected_row_advantage"),
        ("areal_normalization", 0, ("expected", 0), "expected"),
        ("areal_losses", 0, ("expected_stat", "clip_mask", 0, 0), "expected_stat.clip_mask"),
        ("areal_m2po", 0, ("expected_mask", 0, 0), "expected_mask"),
        ("areal_prox_approx", 1, ("loglinear", 0, 1), "loglinear"),
        ("areal_gae", 0, ("expected_advantages", 0, 1), "expected_advantages"),
        ("areal_overlong", 1, ("expected",), "expected"),
    ],
)
def test_an_altered_number_fails_and_is_named(family, number, where, field, altered, capsys):
    def change(held):
        place = held[family][number]
        for step in where[:-1]:
            place = place[step]
        place[where[-1]] += 0.25

    path = altered(family, change)
    label = cases.cases_of(HELD, family)[number].id
    assert main([str(path)]) == 1
    failures = [line for line in capsys.readouterr().out.splitlines() if line.startswith(" ")]
    assert failures[0].startswith(f"    {label}: {field}: off by 0.25")
    assert len(failures) == 1


def test_an_altered_preset_fails_and_is_named(altered, capsys):
    path = altered("rollout_correction_presets", lambda held: held["rollout_correction_presets"].update(
        {"disabled": {**held["rollout_correction_presets"]["disabled"], "rollout_is": "token"}}
    ))  # fmt: skip
    assert main([str(path)]) == 1
    assert "    disabled: weights: 'none' instead of 'token'" in capsys.readouterr().out


def test_verbose_prints_expected_and_got(altered, capsys):
    path = altered("pass_at_k", lambda held: held["pass_at_k"][5].update(expected=0.75))
    assert main([str(path), "--verbose"]) == 1
    out = capsys.readouterr().out
    assert "expected 0.75" in out
    assert "got      0.46428571428571" in out


@pytest.mark.parametrize(
    ("family", "change", "reason"),
    [
        ("group_advantages", {"estimator": "astrology"}, "unknown estimator 'astrology'"),
        ("group_advantages", {"estimator": "gae"}, "'gae' estimates by token"),
        ("token_advantages", {"estimator": "grpo"}, "'grpo' estimates by row"),
        ("policy_losses", {"loss": "astrology"}, "unknown loss 'astrology'"),
        ("policy_losses", {"agg": "astrology"}, "unknown aggregation 'astrology'"),
        ("kl", {"estimator": "k9"}, "unknown divergence 'k9'"),
        ("rollout_correction", {"config": {"rollout_is": "astral"}}, "unknown level of importance weights 'astral'"),
        (
            "rollout_correction",
            {"config": {"rollout_rs": "x", "rollout_rs_threshold": 1}},
            "unknown rejection rule 'x'",
        ),
        ("field_cases", {"id": "field/something_new"}, "unknown field case 'field/something_new'"),
        ("areal_losses", {"id": "astrology"}, "unknown loss 'astrology'"),
        ("areal_normalization", {"mean_level": "planet"}, "unknown scope 'planet'"),
        ("pass_at_k", {"expected_variance": 1.0}, "expected_variance: nothing here is compared with it"),
        ("policy_losses", {"expected_metrics": {"actor/luck": 1.0}}, "unknown metric 'actor/luck'"),
        ("group_advantages", {"rewards": [1.0, 0.0, 2.0]}, "error: "),
    ],
)
def test_an_invalid_case_fails_with_a_reason(family, change, reason, altered, capsys):
    path = altered(family, lambda held: held[family][1].update(change))
    assert main([str(path)]) == 1
    out = capsys.readouterr().out
    assert reason in out
    assert f"{family}:" in out
    assert out.splitlines()[0].endswith("/1")


def test_a_case_without_an_expectation_fails(altered, capsys):
    path = altered("areal_prox_approx", lambda held: held["areal_prox_approx"].append({"versions": [[0]]}))
    assert main([str(path)]) == 1
    assert "the case expects nothing that is known here" in capsys.readouterr().out


def test_unknown_families_fail_case_by_case(altered, capsys):
    path = altered("kl", lambda held: held.update(horoscopes=[{"id": "aries"}, {"id": "taurus"}], stars={"sun": {}}))
    assert main([str(path)]) == 1
    out = capsys.readouterr().out
    assert "    aries: family: unknown family 'horoscopes'" in out
    assert [line.split()[-1] for line in out.splitlines() if not line.startswith(" ")] == ["4/0", "0/2", "0/1", "4/3"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file or directory"),
        (b"{", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[]", "not a conformance file"),
        (b'{"meta": {}, "kl": []}', "holds no case"),
    ],
)
def test_a_file_that_cannot_be_run_exits_with_2(content, reason, tmp_path, capsys):
    path = tmp_path / "file.json"
    if content is not None:
        path.write_bytes(content)
    assert main([str(path)]) == 2
    captured = capsys.readouterr()
    assert reason in captured.err
    assert str(path) in captured.err
    assert not captured.out


def test_a_directory_exits_with_2(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "Is a directory" in capsys.readouterr().err
