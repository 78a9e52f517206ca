"""Filters: which groups they keep, judged by the completions of B only."""

import math

import pytest
import torch

from workers.train.algorithms.grouping import Grouping
from workers.train.algorithms.shaping import FILTERS, min_valid_rows, zero_variance

# Four groups, interleaved: {1, 0, junk}, {0.9, 0.9, 0.9}, {0.5}, and one without valid completions.
IDS = torch.tensor([0, 1, 2, 0, 1, 3, 0, 1])
VALID = torch.tensor([1, 1, 1, 1, 1, 0, 0, 1]).bool()
REWARDS = torch.tensor([1.0, 0.9, 0.5, 0.0, 0.9, math.nan, math.inf, 0.9], dtype=torch.float64)
GROUPS = Grouping(IDS, VALID, 4)


def test_min_valid_rows_counts_completions_in_b():
    assert min_valid_rows(GROUPS, min_valid_rows=2).tolist() == [True, True, False, False]
    assert min_valid_rows(GROUPS, min_valid_rows=1).tolist() == [True, True, True, False]


def test_equal_rewards_are_dropped_and_a_single_completion_is_no_tie():
    assert zero_variance(REWARDS, GROUPS).tolist() == [True, False, True, True]


def test_rewards_that_differ_by_very_little_are_no_tie():
    groups = Grouping(torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool))
    assert zero_variance(torch.tensor([0.5, 0.5, 0.5 + 1e-9], dtype=torch.float64), groups).tolist() == [True]


def test_a_failed_verifier_does_not_make_a_tie_worth_training():
    """Rewards [1, 1, 1, verifier failed]: a score of 0 for the last would count as variance."""
    groups = Grouping(torch.zeros(4, dtype=torch.int64), torch.tensor([True, True, True, False]))
    assert zero_variance(torch.tensor([1.0, 1.0, 1.0, 0.0]), groups).tolist() == [False]


@pytest.mark.parametrize("name", FILTERS)
def test_without_groups_nothing_is_dropped(name):
    none = torch.zeros(0)
    groups = Grouping(none.long(), none.bool())
    options = {
        "min_valid_rows": 2,
        "min_mean_reward": 0.0,
        "max_mean_reward": 1.0,
        "min_advantage": 0.0,
        "max_advantage": 1.0,
    }
    result = FILTERS[name]({"rewards_C": none, "groups": groups, "advantages_C": none}, options)
    assert (result.shape, result.dtype) == ((0,), torch.bool)
