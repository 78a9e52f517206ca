"""Advantage estimators against worked examples and published implementations."""

import math

import pytest
import torch

from workers.train.advantages import ESTIMATORS, estimator, grpo


def advantages(rewards, valid=None, groups=None, **options):
    valid = [True] * len(rewards) if valid is None else valid
    codes = {name: code for code, name in enumerate(dict.fromkeys(groups or [0] * len(rewards)))}
    ids = torch.tensor([codes[name] for name in groups or [0] * len(rewards)])
    return grpo(torch.tensor(rewards, dtype=torch.float64), ids, torch.tensor(valid), **options).tolist()


MEAN = {"normalize_std": False}
STD = {"normalize_std": True, "epsilon": 1e-6}
WORKED = {
    "a rejected row leaves its siblings [0, -0.5, 0.5]": ([100.0, 1, 2], [0, 1, 1], MEAN, [0, -0.5, 0.5]),
    "a rejected row and one sibling": ([100.0, 1], [0, 1], MEAN, [0, 0]),
    "mean baseline with row 1 masked": ([1.0, 1, 0, 0], [1, 0, 1, 1], MEAN, [0.6667, 0, -0.3333, -0.3333]),
    "the same by its sample std": ([1.0, 1, 0, 0], [1, 0, 1, 1], STD, [1.1547, 0, -0.5774, -0.5774]),
    "an unmeasured reward": ([1.0, 3, 2, math.nan], [1, 1, 1, 0], MEAN, [-1, 1, 0, 0]),
    "three right and a crashed verifier": ([1.0, 1, 1, 0], [1, 1, 1, 0], STD, [0, 0, 0, 0]),
    "a truncated row under exclude": ([1.0, 100], [1, 0], MEAN, [0, 0]),
    "a truncated row under keep": ([1.0, 100], [1, 1], MEAN, [-49.5, 49.5]),
}


@pytest.mark.parametrize(("rewards", "valid", "options", "expected"), WORKED.values(), ids=WORKED.keys())
def test_worked_example(rewards, valid, options, expected):
    assert advantages(rewards, [bool(v) for v in valid], **options) == pytest.approx(expected, abs=1e-4)


NAN, INF = math.nan, math.inf
# Rewards, validity, expected; computed with verl's functions on the valid rows alone.
BY_STD = {
    "two": ([1.0, 0.0], "++", [0.7071057812, -0.7071057812]),
    "three": ([1.0, 0.0, 2.0], "+++", [0.0, -0.999999, 0.999999]),
    "ramp": (
        [0.1, 0.2, 0.3, 0.4, 0.5, 0.6],
        "++++++",
        [-1.3362990667, -0.80177944, -0.2672598133, 0.2672598133, 0.80177944, 1.3362990667],
    ),
    "tiny variance": (
        [1.0, 1.00001, 1.00002, 1.00003],
        "++++",
        [-1.078365195, -0.359455065, 0.359455065, 1.078365195],
    ),
    "invalid NaN": ([1.0, NAN, 2.0], "+-+", [-0.7071057812, 0.0, 0.7071057812]),
    "invalid infinity": ([0.0, 0.0, 0.0, INF], "+++-", [0.0, 0.0, 0.0, 0.0]),
    "invalid million": (
        [0.1, 0.2, 0.3, 0.4, 0.5, 1e6],
        "+++++-",
        [-1.2649030641, -0.6324515321, 0.0, 0.6324515321, 1.2649030641, 0.0],
    ),
    "several invalid": (
        [NAN, 5.0, 5.0, INF, -5.0, 0.0, -1e9],
        "-++-++-",
        [0.0, 0.7833492882, 0.7833492882, 0.0, -1.3055821469, -0.2611164294, 0.0],
    ),
    "all invalid": ([NAN] * 4, "----", [0.0] * 4),
}


@pytest.mark.parametrize(("rewards", "valid", "expected"), BY_STD.values(), ids=BY_STD.keys())
def test_group_normalised_rewards_equal_those_of_the_reference(rewards, valid, expected):
    assert advantages(rewards, [v == "+" for v in valid], **STD) == pytest.approx(expected, abs=1e-6, rel=1e-6)


def test_groups_are_found_by_id_however_they_are_interleaved():
    rewards = [1.0, 0.5, 0.0, 2.0, -1.0, 0.5, 3.0, 0.25, 0.0, 1.0]
    expected = [
        *[0.375, 0.5833333333, -0.625, 0.3333333333, -0.9166666667],
        *[-0.125, 1.3333333333, 0.3333333333, -1.6666666667, 0.375],
    ]
    assert advantages(rewards, groups=list("abacbacbca"), **MEAN) == pytest.approx(expected)


def test_groups_of_one_to_four_with_invalid_rows():
    rewards = [1e9, NAN, 0.0, 0.3, 0.6, 1e9, -1.0, 0.0, 1.0, NAN]
    valid = [v == "+" for v in "--+++-+++-"]
    expected = [0.0, 0.0, 0.0, -0.15, 0.15, 0.0, -1.0, 0.0, 1.0, 0.0]
    assert advantages(rewards, valid, list("1223334444"), **MEAN) == pytest.approx(expected)


def test_three_fives_between_other_groups_are_exactly_zero():
    rewards = [0.0, 1, 2, 3, 5, 5, 5, 0, 1, 0, 1]
    found = advantages(rewards, groups=list("aaaabbbcccc"), **MEAN)
    assert found == [-1.5, -0.5, 0.5, 1.5, 0, 0, 0, -0.5, 0.5, -0.5, 0.5]


@pytest.mark.parametrize("size", [2, 3, 4, 7, 10])
@pytest.mark.parametrize("reward", [0.9, 0.1, 1 / 3, -1e9 - 0.1])
def test_equal_rewards_are_exactly_zero(reward, size):
    assert advantages([reward] * size, normalize_std=True, epsilon=1e-12) == [0.0] * size


@pytest.mark.parametrize(("mode", "expected"), [("zero", 0.0), ("drop", 0.0), ("raw", 3.0)])
def test_a_singleton_gets_what_its_mode_says(mode, expected):
    assert advantages([3.0, NAN], [True, False], **STD, singleton=mode) == [expected, 0.0]


def test_ids_need_not_be_small_or_consecutive():
    ids = torch.tensor([10**12, -5, 10**12, -5])
    found = grpo(torch.tensor([1.0, 2.0, 3.0, 6.0]), ids, torch.ones(4).bool(), normalize_std=False)
    assert found.tolist() == [-1.0, -2.0, 1.0, 2.0]


def test_statistics_are_exact_at_a_large_offset():
    found = advantages([1e4, 1e4 + 1, 1e4 + 2, 1e4 + 3], **MEAN)
    assert found == [-1.5, -0.5, 0.5, 1.5]


def test_whole_numbers_are_not_truncated():
    found = grpo(torch.tensor([1, 0, 0, 0]), torch.zeros(4).long(), torch.ones(4).bool(), normalize_std=False)
    assert found.tolist() == [0.75, -0.25, -0.25, -0.25]


def test_an_estimator_takes_its_options_from_the_settings_by_name():
    chosen = ESTIMATORS["grpo"]
    assert chosen.options == ("normalize_std", "epsilon", "singleton")
    settings = {"normalize_std": False, "epsilon": 1.0, "clip_low": 0.2}
    found = chosen(torch.tensor([1.0, 3.0]), torch.zeros(2).long(), torch.ones(2).bool(), settings)
    assert found.tolist() == [-1.0, 1.0]


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="'grpo' is registered already"):
        estimator("grpo", formula="", source="", mean_centred=True, shift_invariant=True, scale_invariant=True)(grpo)
