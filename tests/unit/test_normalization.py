"""Normalisers by worked examples. References: conformance; twins: test_twins_of_advantages."""

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


def test_token_groups_are_found_by_id():
    values, mask = torch.tensor([[1.0, 3], [10, 0], [5, 0]]), torch.tensor([[1, 1], [1, 0], [1, 0]]).bool()
    result = normalize_tokens(values, mask, torch.tensor([7, -1, 7]), **(OPTIONS | {"mean": "group"}))
    assert result.tolist() == [[-2, 0], [0, 0], [2, 0]]


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
