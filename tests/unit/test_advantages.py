"""Estimators with one value per completion, by worked examples. References: conformance; twins: property tests."""

import math

import pytest
import torch

from workers.train.algorithms.advantages import ESTIMATORS, EstimatorTraits, estimate
from workers.train.algorithms.grouping import Grouping
from workers.train.algorithms.token_advantages import TokenAdvantages

NAN, INF = math.nan, math.inf
DEFAULTS = {
    "center": "completions",
    "normalize_std": True,
    "leave_one_out": False,
    "epsilon": 1e-6,
    "f_norm": 1.0,
    "k": 2,
}
COMPLETION = [name for name, estimator in ESTIMATORS.items() if estimator.traits.level == "completion"]
WITHIN_GROUP = [name for name in COMPLETION if ESTIMATORS[name].traits.within_group]


def inputs(rewards, valid=None, groups=None, lengths=None, loss_lengths=None, parts=None, weights=None):
    valid = torch.tensor([1] * len(rewards) if valid is None else valid, dtype=torch.bool)
    names = [0] * len(rewards) if groups is None else list(groups)
    codes = {name: code for code, name in enumerate(dict.fromkeys(names))}
    ids = torch.tensor([codes[name] for name in names], dtype=torch.int64)
    values = torch.tensor(rewards, dtype=torch.float64)
    lengths = torch.tensor([1] * len(rewards) if lengths is None else lengths, dtype=torch.int64)
    loss_lengths = lengths if loss_lengths is None else torch.tensor(loss_lengths)
    return {
        "rewards_C": values,
        "groups": Grouping(ids, valid, len(codes)),
        "lengths_C": lengths,
        "loss_lengths_C": loss_lengths * valid,
        "parts_PC": values.unsqueeze(0) if parts is None else torch.tensor(parts, dtype=torch.float64),
        "has_part_PC": torch.ones(1 if parts is None else len(parts), len(rewards), dtype=torch.bool),
        "part_weights_P": torch.ones(1) if weights is None else torch.tensor(weights),
        "correct_C": values >= 1,
    }


def advantages(name, *case, singleton="zero", options=(), **columns):
    result = estimate(name, inputs(*case, **columns), DEFAULTS | dict(options), single_sample_policy=singleton)
    assert result.dtype == torch.float64
    return result.tolist()


MEAN, LEAVE_ONE_OUT = {"normalize_std": False}, {"normalize_std": False, "leave_one_out": True}
WORKED = {
    "a rejected row leaves its siblings [0, -0.5, 0.5]": ("grpo", [100.0, 1, 2], [0, 1, 1], MEAN, [0, -0.5, 0.5]),
    "the same by rloo": ("rloo", [100.0, 1, 2], [0, 1, 1], {}, [0, -1, 1]),
    "a rejected row and one sibling": ("grpo", [100.0, 1], [0, 1], MEAN, [0, 0]),
    "mean baseline with row 1 masked": ("dr_grpo", [1.0, 1, 0, 0], [1, 0, 1, 1], {}, [0.6667, 0, -0.3333, -0.3333]),
    "the same by its sample std": ("grpo", [1.0, 1, 0, 0], [1, 0, 1, 1], {}, [1.1547, 0, -0.5774, -0.5774]),
    "an unmeasured reward": ("grpo", [1.0, 3, 2, NAN], [1, 1, 1, 0], MEAN, [-1, 1, 0, 0]),
    "three right and a crashed verifier": ("grpo", [1.0, 1, 1, 0], [1, 1, 1, 0], {}, [0, 0, 0, 0]),
    "a truncated row under exclude": ("grpo", [1.0, 100], [1, 0], MEAN, [0, 0]),
    "a truncated row under keep": ("grpo", [1.0, 100], [1, 1], MEAN, [-49.5, 49.5]),
    "one of four by rloo": ("rloo", [0.0, 0, 0, 1], [1] * 4, {}, [-1 / 3, -1 / 3, -1 / 3, 1]),
    "leave one out is rloo": ("grpo", [0.0, 0, 0, 1], [1] * 4, LEAVE_ONE_OUT, [-1 / 3, -1 / 3, -1 / 3, 1]),
    "one of four in units of the mean": ("max_rl", [0.0, 0, 0, 1], [1] * 4, {}, [-1, -1, -1, 3]),
    "no reward has no unit": ("max_rl", [0.0, 0, 0], [1] * 3, {}, [0, 0, 0]),
    "a mean below zero would turn every sign": ("max_rl", [-1.0, -2], [1] * 2, {}, [0, 0]),
    "the best of three": ("grpo_passk", [1.0, 0, 2], [1] * 3, MEAN, [0, 0, 1]),
    "two are the best": ("grpo_passk", [2.0, 0, 2], [1] * 3, MEAN, [0, 0, 0]),
    "credit goes to the best valid row": ("grpo_passk", [9.0, 1, 0], [0, 1, 1], MEAN, [0, 1, 0]),
    "pass@2 of four, one right": ("passk", [1.0, 0, 0, 0], [1] * 4, {"k": 2}, [1, -1 / 3, -1 / 3, -1 / 3]),
    "pass@1 is the standard score": ("passk", [1.0, 0, 0, 0], [1] * 4, {"k": 1}, [3**0.5, *[-(3**-0.5)] * 3]),
    "every draw of two has a right one": ("passk", [1.0, 1, 0], [1] * 3, {"k": 2}, [0, 0, 0]),
    "fewer than k that are valid": ("passk", [1.0, 0, 0], [1, 1, 0], {"k": 3}, [0, 0, 0]),
    "gpg scales by rewards that are not 0": ("gpg", [1.0, 0, 1, 0], [1] * 4, {}, [1, -1, 1, -1]),
    "padding rows are not in gpg's alpha": ("gpg", [1.0, 0, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], {}, [1, -1, 1, -1, 0, 0]),
    "gpg divides by f_norm": ("gpg", [1.0, 0, 1, 0], [1] * 4, {"f_norm": 2.0}, [0.5, -0.5, 0.5, -0.5]),
}


@pytest.mark.parametrize(("name", "rewards", "valid", "options", "expected"), WORKED.values(), ids=WORKED.keys())
def test_the_documented_example_gives_its_advantages(name, rewards, valid, options, expected):
    assert advantages(name, rewards, valid, options=options) == pytest.approx(expected, abs=1e-4)


def test_a_baseline_can_be_weighted_by_length():
    assert advantages("opo", [0.0, 0, 0, 1], lengths=[4, 3, 2, 1]) == pytest.approx([-0.1, -0.1, -0.1, 0.9])


def test_a_group_without_tokens_has_no_length_weighted_mean():
    result = advantages("opo", [0.0, 1, 0, 2], groups="aabb", lengths=[0, 0, 1, 1])
    assert result == [0, 0, -1, 1]


def test_a_completion_without_loss_counts_in_its_group_and_not_in_the_batch():
    rewards, lengths, loss_lengths = [1.0, 0.0, 4.0], [2, 2, 4], [2, 2, 0]
    kept = advantages("reinforce_plus_plus_baseline", rewards, lengths=lengths, loss_lengths=loss_lengths)
    centred = [r - 5 / 3 for r in rewards]
    mean, variance = (centred[0] + centred[1]) / 2, 1 / 3
    expected = [(c - mean) / math.sqrt(variance + 1e-8) for c in centred]
    assert kept == pytest.approx(expected)
    scaled = advantages("gpg", rewards, lengths=lengths, loss_lengths=loss_lengths)
    assert scaled == pytest.approx([2 * c for c in centred])
    by_length = advantages("opo", rewards, lengths=lengths, loss_lengths=loss_lengths)
    assert by_length == pytest.approx([1 - 18 / 8, -18 / 8, 4 - 18 / 8])


def test_gdpo_compares_a_part_among_completions_that_have_it():
    """An absent part is not compared as 0."""
    rewards, parts = [0.0] * 4, torch.tensor([[1.0, 3.0, 0.0, 0.0], [0.0, 0.0, 5.0, 9.0]])
    case = inputs(rewards, parts=parts.tolist(), weights=[1.0, 1.0]) | {"has_part_PC": parts > 0}
    apart = case | {"groups": Grouping(torch.tensor([0, 0, 1, 1]), torch.ones(4, dtype=torch.bool), 2)}
    result, expected = (estimate("gdpo", each, DEFAULTS, single_sample_policy="zero") for each in (case, apart))
    assert result.tolist() == pytest.approx(expected.tolist())
    assert result.tolist() == pytest.approx([-(0.75**0.5), 0.75**0.5] * 2)


def test_equal_rewards_between_other_groups_give_exactly_zero():
    rewards = [0.0, 1, 2, 3, 5, 5, 5, 0, 1, 0, 1]
    result = advantages("dr_grpo", rewards, groups="aaaabbbcccc")
    assert result == [-1.5, -0.5, 0.5, 1.5, 0, 0, 0, -0.5, 0.5, -0.5, 0.5]


@pytest.mark.parametrize("name", WITHIN_GROUP)
@pytest.mark.parametrize(("size", "reward"), [(3, 0.9), (7, 0.1), (10, 1e4 + 0.1)])
def test_equal_rewards_give_exactly_zero(name, reward, size):
    lengths = list(range(1, size + 1))
    assert advantages(name, [reward] * size, lengths=lengths, options={"epsilon": 1e-12}) == [0.0] * size


@pytest.mark.parametrize("epsilon", [0.0, 1e-300])
def test_equal_rewards_give_zero_without_epsilon(epsilon):
    assert advantages("grpo", [0.9] * 4, options={"epsilon": epsilon}) == [0.0] * 4


@pytest.mark.parametrize("name", WITHIN_GROUP)
def test_a_single_valid_completion_keeps_its_reward_under_that_policy(name):
    rewards, groups = [3.0, NAN, 1.0, 0.0], "aabb"
    zero = advantages(name, rewards, [True, False, True, True], groups)
    raw = advantages(name, rewards, [True, False, True, True], groups, singleton="raw")
    assert raw == [3.0, 0.0, *zero[2:]]


@pytest.mark.parametrize("name", COMPLETION)
@pytest.mark.parametrize("size", [0, 3])
def test_without_valid_completions_all_advantages_are_zero(name, size):
    assert advantages(name, [NAN] * size, [False] * size) == [0.0] * size


def test_whole_numbers_are_not_truncated():
    groups = Grouping(torch.zeros(4).long(), torch.ones(4).bool(), 1)
    result = estimate(
        "dr_grpo", {"rewards_C": torch.tensor([1, 0, 0, 0]), "groups": groups}, {}, single_sample_policy="zero"
    )
    assert result.tolist() == [0.75, -0.25, -0.25, -0.25]


def test_pass_at_k_works_for_large_groups():
    correct = torch.arange(1000) < 10
    groups = Grouping(torch.zeros(1000).long(), torch.ones(1000).bool(), 1)
    result = estimate("passk", {"groups": groups, "correct_C": correct}, {"k": 200}, single_sample_policy="zero")
    failing = math.comb(990, 200) / math.comb(1000, 200)
    expected = failing / math.sqrt(failing * (1 - failing))
    assert result[0].item() == pytest.approx(expected, rel=1e-9)
    assert result[999].item() == pytest.approx(-expected * 10 / 990, rel=1e-9)


def test_token_level_estimators_are_registered():
    assert {"gae", "reinforce_plus_plus", "remax"} <= set(ESTIMATORS)
    sheet = {"token_rewards_CT": torch.ones(1, 2), "mask_CT": torch.ones(1, 2).bool(), "greedy_C": torch.ones(1)}
    result = estimate("remax", sheet, {}, single_sample_policy="raw")
    assert isinstance(result, TokenAdvantages)
    assert result.advantages_CT.tolist() == [[1.0, 0.0]]


def test_an_estimator_declares_inputs_and_options():
    assert ESTIMATORS["opo"].input_names == ("rewards_C", "groups", "lengths_C")
    assert ESTIMATORS["grpo"].option_names == ("normalize_std", "leave_one_out", "epsilon")
    with pytest.raises(KeyError, match="lengths_C"):
        estimate("opo", {"rewards_C": torch.ones(1), "groups": None}, {}, single_sample_policy="zero")


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="'grpo' is registered already"):
        ESTIMATORS.register("grpo", EstimatorTraits(level="completion"), formula="", source="")(lambda groups: groups)
