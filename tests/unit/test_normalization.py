"""Normalisers against worked examples and published implementations."""

import math
from itertools import permutations

import pytest
import torch

from workers.train.algorithms.grouping import Grouping
from workers.train.algorithms.normalization import (
    LEVELS,
    NORMALIZERS,
    normalize,
    normalize_tokens,
    whiten,
    whiten_for_completions,
)

NAN, INF = math.nan, math.inf
OPTIONS = {"mean": "none", "std": "none", "leave_one_out": False, "unbiased": True, "epsilon": 1e-5}


def normalized(values, valid=None, groups=None, loss=None, **options):
    valid = torch.tensor([1] * len(values) if valid is None else valid, dtype=torch.bool)
    ids = torch.tensor([0] * len(values) if groups is None else [ord(g) for g in groups], dtype=torch.int64)
    loss = None if loss is None else torch.tensor(loss).bool()
    result = normalize(torch.tensor(values, dtype=torch.float64), Grouping(ids, valid), loss, **(OPTIONS | options))
    assert result.dtype == torch.float64
    return result.tolist()


def test_a_completion_excluded_for_truncation_does_not_count():
    assert normalized([1.0, 100], [1, 0], mean="batch") == [0, 0]
    assert normalized([1.0, NAN], [1, 0], mean="batch", std="batch") == [0, 0]
    assert normalized([1.0, INF], [1, 0], mean="group", leave_one_out=True) == [0, 0]
    assert normalized([1.0, 100], [1, 1], mean="batch") == [-49.5, 49.5]


# Expected: AReaL's Normalization on the valid values only, in float32.
INVALID = [1.0, 0.0, 9e9, 1.0, 0.5, -2.0, 3.0, NAN], [1, 1, 0, 1, 1, 1, 1, 0], "aaaabbbb"
UNEVEN = [1.0, 1.0, 1.0, 5.0, INF, 2.0, 7.0], [1, 1, 1, 1, 0, 1, 1], "aaabccc"
PLAIN = [1.0, 0.0, 0.0, 1.0, 0.5, -2.0, 3.0, 3.0], [1] * 8, "aaaabbbb"
REFERENCE = {
    "batch, batch": (
        INVALID,
        {"mean": "batch", "std": "batch"},
        [0.2563581169, -0.3589013815, 0, 0.2563581169, -0.0512716249, -1.5894203186, 1.4868770838, 0],
    ),
    "batch, leave one out": (
        INVALID,
        {"mean": "batch", "leave_one_out": True},
        [0.5, -0.6999999881, 0, 0.5, -0.1000000015, -3.0999999046, 2.9000000954, 0],
    ),
    "group, batch": (
        INVALID,
        {"mean": "group", "std": "batch"},
        [0.2054107487, -0.4108214974, 0, 0.2054107487, 0, -1.5405805111, 1.5405805111, 0],
    ),
    "batch, group, where one stands alone": (
        UNEVEN,
        {"mean": "batch", "std": "group"},
        [-0.8164929152, -0.8164929152, -0.8164929152, 2.16664505, 0, -0.1961156726, 0.9805783629],
    ),
    "group, leave one out": (UNEVEN, {"mean": "group", "leave_one_out": True}, [0, 0, 0, 0, 0, -5, 5]),
    "none, batch": (
        UNEVEN,
        {"std": "batch"},
        [0.2484513819, 0.2484513819, 0.2484513819, 1.2422568798, 0, 0.4969027638, 1.7391597033],
    ),
    "none, none": (UNEVEN, {}, [1, 1, 1, 5, 0, 2, 7]),
    "none, group, biased": (
        PLAIN,
        {"std": "group", "unbiased": False},
        [1.414193511, 0, 0, 1.414193511, 0.2119986713, -0.8479946852, 1.2719920874, 1.2719920874],
    ),
    "batch, group, biased": (
        PLAIN,
        {"mean": "batch", "std": "group", "unbiased": False},
        [
            *[0.3179939687, -1.3779739141, -1.3779739141, 0.3179939687],
            *[-0.1490704864, -1.3416343927, 1.0434933901, 1.0434933901],
        ],
    ),
}


@pytest.mark.parametrize(("case", "options", "expected"), REFERENCE.values(), ids=REFERENCE.keys())
def test_levels_of_mean_and_std_are_independent(case, options, expected):
    assert normalized(*case, **options) == pytest.approx(expected, abs=1e-6, rel=1e-6)


def test_the_std_is_around_the_selected_mean():
    # Relative to the mean of the others, the deviations of 0, 1, 2 are -1.5, 0, 1.5.
    result = normalized([0.0, 1, 2], mean="group", std="group", leave_one_out=True, epsilon=0.0)
    assert result == pytest.approx([-1.5 / 1.5, 0, 1.5 / 1.5])


@pytest.mark.parametrize("mean", ["group", "batch"])
@pytest.mark.parametrize("std", LEVELS)
@pytest.mark.parametrize("leave_one_out", [True, False])
@pytest.mark.parametrize("values", [[0.9] * 4, [1e4 + 0.1] * 7, [3.0]])
def test_equal_values_and_a_single_value_give_exactly_zero(mean, std, leave_one_out, values):
    result = normalized(values, mean=mean, std=std, leave_one_out=leave_one_out, epsilon=0.0)
    assert result == [0.0] * len(values)


def test_a_completion_without_loss_counts_in_its_group_and_not_in_the_batch():
    values, loss = [0.0, 2, 7], [1, 1, 0]
    assert normalized(values, loss=loss, mean="group") == [-3, -1, 4]
    assert normalized(values, loss=loss, mean="batch") == [-1, 1, 6]
    assert normalized(values, loss=loss, mean="batch", leave_one_out=True) == [-2, 2, 6]
    assert normalized(values, loss=[0, 0, 0], mean="batch") == [0, 0, 0]


@pytest.mark.parametrize("options", [{"mean": "row"}, {"std": "global"}])
def test_an_unknown_scope_is_an_error(options):
    with pytest.raises(ValueError, match=r"unknown scope '(row|global)'; use one of none, group, batch"):
        normalized([1.0], **options)


def test_every_token_has_equal_weight():
    # AReaL's Normalization on tokens; one group of two rows, so both levels agree.
    values, mask = torch.tensor([[1.0, 2, NAN], [3, -1, 4]]), torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
    expected = [[-0.415898025, 0.1039745063, 0], [0.6238470674, -1.455643177, 1.1437195539]]
    for levels in ({"mean": "batch", "std": "group"}, {"mean": "group", "std": "batch"}):
        result = normalize_tokens(values, mask, torch.zeros(2).long(), **(OPTIONS | levels))
        assert torch.allclose(result, torch.tensor(expected).double(), atol=1e-6)


def test_tokens_of_an_excluded_row_do_not_affect_others():
    values, mask = torch.tensor([[1.0, 1, 0], [100, 100, 100]]), torch.tensor([[1, 1, 0], [0, 0, 0]]).bool()
    result = normalize_tokens(values, mask, torch.zeros(2).long(), **(OPTIONS | {"mean": "batch", "std": "batch"}))
    assert result.tolist() == [[0.0] * 3] * 2


def test_token_groups_are_found_by_id():
    values, mask = torch.tensor([[1.0, 3], [10, 0], [5, 0]]), torch.tensor([[1, 1], [1, 0], [1, 0]]).bool()
    result = normalize_tokens(values, mask, torch.tensor([7, -1, 7]), **(OPTIONS | {"mean": "group"}))
    assert result.tolist() == [[-2, 0], [0, 0], [2, 0]]


def test_whitening_equals_the_reference():
    values, mask = torch.tensor([[1.0, 2, 3], [4, 50, INF]]), torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
    result = whiten(values, mask)
    expected = [[-1.161894997, -0.3872983291, 0.3872983388], [1.1618950067, 0, 0]]
    assert torch.allclose(result, torch.tensor(expected).double(), atol=1e-6)
    scaled = whiten(values, mask, shift=False)
    assert torch.allclose(scaled, torch.where(mask, result + 2.5, 0.0))
    biased = whiten(values, mask, unbiased=False)
    assert torch.allclose(biased, result * math.sqrt(4 / 3))


def test_a_weight_counts_like_repeated_values():
    values, weights = torch.tensor([1.0, 5, 2, 9]), torch.tensor([2, 1, 3, 0])
    counted = whiten(values, torch.ones(4).bool(), weights)
    repeated = whiten(values.repeat_interleave(weights), torch.ones(6).bool())
    assert counted[:3].tolist() == pytest.approx(repeated[[0, 2, 3]].tolist())


@pytest.mark.parametrize("value", [0.9, 1e4 + 0.1, -1 / 3])
def test_whitened_equal_values_are_exactly_zero(value):
    mask = torch.tensor([1, 1, 1, 0, 1, 1, 1]).bool()
    values = torch.where(mask, value, NAN).double()
    assert whiten(values, mask, epsilon=0.0).tolist() == [0.0] * 7
    kept = whiten(values, mask, shift=False)
    assert torch.equal(kept, torch.where(mask, values, 0.0))


def test_a_completion_as_good_as_the_mean_has_no_advantage_in_any_order():
    """The sign of rounding noise would decide on which side its tokens are clipped."""
    rewards = torch.tensor([-2 / 3, -2 / 3, -2 / 3, 0.0, 2.0], dtype=torch.float64)
    tokens = torch.tensor([1, 1, 1, 2, 1])
    every = torch.ones(5).bool()
    for order in permutations(range(5)):
        values, weights = rewards[list(order)], tokens[list(order)]
        result = whiten_for_completions(values, every, weights, every, center="completions")
        assert result[order.index(3)] == 0, order


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("junk", [NAN, INF, -INF, 1e30])
def test_junk_outside_the_mask_changes_no_bit(level, junk):
    mask = torch.tensor([[0, 1, 1], [1, 0, 1], [0, 0, 0]]).bool()
    options = OPTIONS | {"mean": level, "std": level}

    def found(value):
        values = torch.where(mask, torch.tensor([[0, 1.0, 2], [4, 0, 7], [0, 0, 0]]), value)
        groups = Grouping(torch.zeros(9).long(), mask.flatten(), 1)
        return [
            whiten(values, mask).flatten().tolist(),
            normalize(values.flatten(), groups, **options).tolist(),
            normalize_tokens(values, mask, torch.tensor([0, 1, 0]), **options).flatten().tolist(),
        ]

    assert found(junk) == found(0.0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (2, 0), (2, 3)])
def test_an_empty_mask_gives_zeros(level, shape):
    values, mask, options = torch.full(shape, NAN), torch.zeros(shape).bool(), OPTIONS | {"mean": level, "std": level}
    zeros = torch.zeros(shape).tolist()
    assert whiten(values, mask).tolist() == zeros
    assert whiten(values, mask, torch.ones(shape), shift=False).tolist() == zeros
    assert normalize_tokens(values, mask, torch.arange(shape[0]), **options).tolist() == zeros
    groups = Grouping(torch.arange(values.numel()), mask.flatten())
    assert normalize(values.flatten(), groups, **options).tolist() == [0.0] * values.numel()


def test_inputs_are_not_modified():
    values, mask = torch.tensor([1.0, 2, NAN]).double(), torch.tensor([1, 1, 0]).bool()
    before, groups = values.clone(), Grouping(torch.zeros(3).long(), mask, 1)
    whiten(values, mask, shift=False)
    normalize(values, groups, **(OPTIONS | {"mean": "batch", "std": "group"}))
    assert values[:2].tolist() == before[:2].tolist()


def test_normalizers_are_found_by_name():
    assert NORMALIZERS["normalize"].option_names == ("mean", "std", "leave_one_out", "unbiased", "epsilon")
    assert NORMALIZERS["whiten"].input_names == ("values", "mask", "weights")
