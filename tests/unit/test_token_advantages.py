"""Estimators with one value per token, computed by hand, with gaps in every row."""

import math

import pytest
import torch

from workers.train.algorithms.advantages import ESTIMATORS, estimate
from workers.train.algorithms.grouping import Grouping

TOKEN = [name for name, estimator in ESTIMATORS.items() if estimator.traits.level == "token"]
BASELINES = ["optimal_token_baseline", "tir_optimal_token_baseline"]
OPTIONS = {"discount": 1.0, "gae_lambda": 1.0, "whiten": False, "center": "tokens", "zero_tail": False, "epsilon": 1e-8}


def sheet(mask, rewards, *, values=None, bootstrap=None, greedy=None, groups=None, valid=None, pi=None, weights=None):
    """Make inputs of all estimators; `pi` is the probability of each token, and one other token has the rest."""
    mask = torch.tensor(mask).bool()
    lines = len(mask)

    def tensor(given, default, shape):
        return torch.full(shape, default) if given is None else torch.tensor(given, dtype=torch.float64).view(shape)

    pi = tensor(pi, 0.5, mask.shape)
    valid = torch.tensor([True] * lines if valid is None else valid, dtype=torch.bool)
    ids = torch.tensor([0] * lines if groups is None else groups, dtype=torch.int64)
    return {
        "mask_CT": mask,
        "token_rewards_CT": torch.tensor(rewards, dtype=torch.float64).view(mask.shape),
        "values_CT": tensor(values, 0.0, mask.shape),
        "bootstrap_C": tensor(bootstrap, 0.0, (lines,)),
        "greedy_C": tensor(greedy, 0.0, (lines,)),
        "groups": Grouping(ids, valid),
        "old_logprobs_CT": pi.log(),
        "sum_pi_squared_CT": pi**2 + (1 - pi) ** 2,
        "weights_CT": tensor(weights, 1.0, mask.shape),
    }


def found(name, inputs, **options):
    advantages, returns = estimate(name, inputs, OPTIONS | options, single_sample_policy="zero")
    assert advantages.dtype == returns.dtype == torch.float64
    return advantages.tolist(), returns.tolist()


def test_gae_equals_a_calculation_by_hand():
    # V 1, 2, 3 and rewards 0, 0, 5: errors 0.5 * 2 - 1, 0.5 * 3 - 2, 5 - 3.
    inputs = sheet([[1, 1, 1]], [[0, 0, 5]], values=[[1, 2, 3]])
    advantages, returns = found("gae", inputs, discount=0.5, gae_lambda=0.5)
    assert advantages == [[0 - 0.25 * 0.5 + 0.0625 * 2, -0.5 + 0.25 * 2, 2.0]]
    assert returns == [[1.0, 2.0, 5.0]]


def test_gae_skips_tokens_outside_the_mask_without_a_discount():
    whole = found("gae", sheet([[1, 1]], [[0.5, 2]], values=[[1, 3]]), discount=0.5, gae_lambda=0.5)
    holes = found("gae", sheet([[0, 1, 0, 1, 0]], [[9, 0.5, 9, 2, 9]], values=[[7, 1, 7, 3, 7]]), discount=0.5,
                  gae_lambda=0.5)  # fmt: skip
    for dense, sparse in zip(whole, holes, strict=True):
        assert sparse == [[0.0, dense[0][0], 0.0, dense[0][1], 0.0]]


def test_gae_bootstraps_from_the_value_after_a_truncated_end():
    mask, rewards, values = [[1, 1, 0], [1, 1, 1]], [[0, 1, 0], [0, 0, 1]], [[0, 0, 9], [0, 0, 0]]
    _, returns = found("gae", sheet(mask, rewards, values=values, bootstrap=[10, 0]), discount=0.5)
    assert returns == [[0.5 * (1 + 5), 1 + 5, 0], [0.25, 0.5, 1]]


def test_reward_to_go_is_discounted_by_counted_tokens():
    returns = found("reinforce_plus_plus", sheet([[1, 0, 1, 1]], [[1, 9, 2, 4]]), discount=0.5)
    assert returns == ([[1 + 0.5 * 2 + 0.25 * 4, 0, 4, 4]],) * 2


def test_remax_subtracts_the_greedy_reward():
    advantages, returns = found("remax", sheet([[1, 0, 1], [0, 1, 0]], [[1, 5, 2], [5, 3, 5]], greedy=[2, 4]))
    assert advantages == [[1, 0, 0], [0, -1, 0]]
    assert returns == [[3, 0, 2], [0, 3, 0]]


def test_a_token_baseline_is_the_mean_weighted_by_the_gradient_so_far():
    # Squared length of the gradient at each token: 2 (1 - pi)^2. W: 0.5, 1 and 0.5, 2.5.
    inputs = sheet([[1, 1], [1, 1]], [[0, 2], [0, 4]], pi=[[0.5, 0.5], [0.5, 0]])
    inputs["old_logprobs_CT"][1, 1] = -math.inf  # a probability of 0 is valid as well
    advantages, returns = found("optimal_token_baseline", inputs, epsilon=1e-12)
    first, second = (0.5 * 2 + 0.5 * 4) / 1.0, (1 * 2 + 2.5 * 4) / 3.5
    assert advantages == [pytest.approx([2 - first, 2 - second]), pytest.approx([4 - first, 4 - second])]
    assert returns == [[2, 2], [4, 4]]


def test_only_the_longest_completion_has_tokens_without_a_baseline():
    mask, rewards = [[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]], [[0, 0, 0, 8], [0, 4, 0, 0], [3, 0, 0, 0]]
    kept, _ = found("optimal_token_baseline", sheet(mask, rewards), zero_tail=True)
    without, _ = found("optimal_token_baseline", sheet(mask, rewards))
    assert kept[0][2:] == [8.0, 8.0]
    assert without[0][2:] == pytest.approx([0.0, 0.0], abs=1e-6)
    assert [line[:2] for line in kept] == [line[:2] for line in without]


@pytest.mark.parametrize("name", BASELINES)
def test_two_longest_completions_have_a_baseline_to_the_end(name):
    mask, rewards = [[1, 1, 1], [1, 1, 1], [1, 0, 0]], [[0, 0, 8], [0, 4, 0], [3, 0, 0]]
    assert found(name, sheet(mask, rewards), zero_tail=True) == found(name, sheet(mask, rewards), zero_tail=False)


def test_positions_count_sampled_tokens_only():
    dense = sheet([[1, 1, 1], [1, 1, 1]], [[0, 1, 2], [3, 0, 0]], pi=[[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])
    holes = sheet(
        [[1, 0, 0, 1, 1], [1, 1, 0, 1, 0]],
        [[0, 9, 9, 1, 2], [3, 0, 9, 0, 9]],
        pi=[[0.1, 0.9, 0.9, 0.2, 0.3], [0.4, 0.5, 0.9, 0.6, 0.9]],
    )
    expected, _ = found("tir_optimal_token_baseline", dense)
    advantages, _ = found("tir_optimal_token_baseline", holes)
    assert [[line[t] for t in places] for line, places in zip(advantages, [(0, 3, 4), (0, 1, 3)], strict=True)] == [
        pytest.approx(line) for line in expected
    ]
    assert found("optimal_token_baseline", dense)[0] == [pytest.approx(line) for line in expected]
    assert found("optimal_token_baseline", holes)[0] != advantages


@pytest.mark.parametrize("name", BASELINES)
def test_an_invalid_or_empty_completion_is_not_in_the_baseline(name):
    mask, rewards = [[1, 1], [1, 1], [0, 0], [1, 1]], [[1, 2], [9, 9], [9, 9], [0, 1]]
    advantages, returns = found(name, sheet(mask, rewards, valid=[True, False, True, True]), zero_tail=True)
    alone, _ = found(name, sheet([[1, 1], [1, 1]], [[1, 2], [0, 1]]), zero_tail=True)
    assert [advantages[0], advantages[3]] == alone
    assert advantages[1] == advantages[2] == returns[1] == returns[2] == [0.0, 0.0]


@pytest.mark.parametrize("name", BASELINES)
def test_a_single_completion_keeps_its_reward_to_go(name):
    advantages, returns = found(name, sheet([[1, 0, 1], [1, 1, 0]], [[1, 5, 2], [4, 4, 4]], groups=[3, 8]))
    assert advantages == returns == [[3, 0, 2], [8, 4, 0]]


@pytest.mark.parametrize("name", TOKEN)
@pytest.mark.parametrize(("lines", "width"), [(0, 0), (0, 3), (3, 0), (2, 3)])
def test_an_empty_sheet_or_mask_gives_zeros(name, lines, width):
    inputs = sheet([[0] * width] * lines if lines else [], [[math.nan] * width] * lines)
    inputs = {
        key: value.view(lines, width) if key.endswith("_CT") and not lines else value for key, value in inputs.items()
    }
    advantages, returns = found(name, inputs, whiten=True, zero_tail=True)
    assert advantages == returns == [[0.0] * width] * lines
