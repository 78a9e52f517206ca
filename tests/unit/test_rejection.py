"""Rejection on batches small enough to compute by hand."""

import math
from typing import get_args

import pytest
import torch

from workers.settings import algorithm as settings_presets
from workers.train.algorithms.correction import REJECTIONS, Rejection, RejectionRule, reject
from workers.train.algorithms.sequences import Sequences, log_ratios


def judge(ratios: list[list[float | None]], *rules: RejectionRule, ids: list[int] | None = None) -> Rejection:
    """Make a batch with the ratio pi/mu of each token; None is outside the mask."""
    mask = torch.tensor([[r is not None for r in row] for row in ratios])
    train = torch.tensor([[math.log(r) if r else math.nan for r in row] for row in ratios], dtype=torch.float64)
    return reject(
        rules, log_ratios(train, torch.zeros_like(train), Sequences(mask, torch.tensor(ids or range(len(ratios)))))
    )


def kept(ratios: list[list[float | None]], *rules: RejectionRule, ids: list[int] | None = None) -> list[list[int]]:
    return judge(ratios, *rules, ids=ids).kept_RT.int().tolist()


def test_rules_and_settings_have_the_same_names():
    assert set(REJECTIONS) == set(get_args(settings_presets.Rule))


def test_k1_bounds_the_ratio_of_rollout_to_trainer():
    """verl's k1 is the inverse of the importance ratio: 0.5 ... 1.2 keeps 1.5, and 0.8 ... 2.0 rejects it."""
    assert kept([[1.5]], RejectionRule("token_k1", 0.5, 1.2)) == [[1]]
    assert kept([[1.5]], RejectionRule("token_k1", 0.8, 2.0)) == [[0]]


def test_a_k1_bound_of_0_or_infinity_has_no_effect():
    assert kept([[1e6, 1.0, 1e-6]], RejectionRule("token_k1", 0.0, 2.0)) == [[1, 1, 0]]
    assert kept([[1e6, 1.0, 1e-6]], RejectionRule("token_k1", 0.5, math.inf)) == [[0, 1, 1]]


@pytest.mark.parametrize(
    ("name", "upper", "expected"),
    [
        # d = log 2 in two tokens: k2 = .2402 each, k3 = 2 - 1 - log 2 = .3069 each
        ("token_k2", 0.241, [1, 1, 1]),
        ("token_k2", 0.239, [0, 0, 1]),
        ("token_k3", 0.307, [1, 1, 1]),
        ("token_k3", 0.306, [0, 0, 1]),
        ("seq_sum_k2", 0.481, [1, 1, 1]),
        ("seq_sum_k2", 0.479, [0, 0, 0]),
        ("seq_sum_k3", 0.614, [1, 1, 1]),
        ("seq_sum_k3", 0.613, [0, 0, 0]),
        ("seq_mean_k2", 0.161, [1, 1, 1]),
        ("seq_mean_k2", 0.160, [0, 0, 0]),
        ("seq_mean_k3", 0.205, [1, 1, 1]),
        ("seq_mean_k3", 0.204, [0, 0, 0]),
        ("seq_max_k2", 0.241, [1, 1, 1]),
        ("seq_max_k2", 0.239, [0, 0, 0]),
        ("seq_max_k3", 0.307, [1, 1, 1]),
        ("seq_max_k3", 0.306, [0, 0, 0]),
    ],
)
def test_k2_and_k3_have_an_upper_bound(name, upper, expected):
    assert kept([[2.0, 2.0, 1.0]], RejectionRule(name, 0.0, upper)) == [expected]


def test_seq_sum_k1_bounds_the_product_and_seq_mean_k1_the_geometric_mean():
    assert kept([[2.0, 2.0]], RejectionRule("seq_sum_k1", 0.24, 1.0)) == [[1, 1]]
    assert kept([[2.0, 2.0]], RejectionRule("seq_sum_k1", 0.26, 1.0)) == [[0, 0]]
    assert kept([[4.0, 1.0]], RejectionRule("seq_mean_k1", 0.49, 1.0)) == [[1, 1]]
    assert kept([[4.0, 1.0]], RejectionRule("seq_mean_k1", 0.51, 1.0)) == [[0, 0]]


def test_a_completion_rule_covers_all_rows():
    ratios, ids = [[4.0, 1.0], [1.0, None], [1.0, 1.0]], [3, 8, 3]
    assert kept(ratios, RejectionRule("seq_max_k3", 0.0, 1.0), ids=ids) == [[0, 0], [1, 0], [0, 0]]
    # 4^(1/4) = 1.414; over the first row alone it would be 2
    assert kept(ratios, RejectionRule("seq_mean_k1", 0.7, 1.0), ids=ids) == [[1, 1], [1, 0], [1, 1]]


def test_a_token_must_pass_every_rule_not_only_the_last():
    strict, lax = RejectionRule("token_k1", 0.5, 2.0), RejectionRule("token_k2", 0.0, 100.0)
    for rules in ((strict, lax), (lax, strict)):
        assert judge([[4.0, 1.2]], *rules).kept_RT.tolist() == [[False, True]]


def test_m2po_removes_the_largest_until_the_mean_is_below_the_bound():
    ratios = [[math.exp(0.1), math.exp(-0.5), 1.0], [math.exp(0.3), None, None]]  # d^2: .01, .25, 0, .09
    assert kept(ratios, RejectionRule("m2po", 0.0, 0.09)) == [[1, 1, 1], [1, 0, 0]]  # mean of all is .0875
    assert kept(ratios, RejectionRule("m2po", 0.0, 0.08)) == [[1, 0, 1], [1, 0, 0]]
    assert kept(ratios, RejectionRule("m2po", 0.0, 0.03)) == [[1, 0, 1], [0, 0, 0]]


def test_a_nan_log_ratio_passes_no_rule():
    nan = torch.full((1, 2), math.nan)
    for name in REJECTIONS:
        result = reject(
            [RejectionRule(name, 0.5, 2.0)],
            log_ratios(nan, nan, Sequences(torch.tensor([[True, False]]), torch.tensor([0]))),
        )
        assert not result.kept_RT.any(), name


@pytest.mark.parametrize("log_ratio", [100.0, -100.0])
def test_far_beyond_the_bound_every_rule_but_m2po_rejects(log_ratio):
    """m2po keeps the fewest tokens that it can: those with the smallest d^2."""
    mask = torch.ones(2, 2, dtype=torch.bool)
    for name in REJECTIONS:
        rule = RejectionRule(name, 0.5, 2.0)
        result = reject(
            [rule], log_ratios(torch.full((2, 2), log_ratio), torch.zeros(2, 2), Sequences(mask, torch.arange(2)))
        )
        assert bool(result.kept_RT.any()) == (name == "m2po"), name


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (2, 0), (2, 4)])
def test_without_valid_tokens_nothing_is_kept(shape):
    nan, mask = torch.full(shape, math.nan), torch.zeros(shape, dtype=torch.bool)
    rules = [RejectionRule(name, 0.5, 2.0) for name in REJECTIONS]
    result = reject(rules, log_ratios(nan, nan, Sequences(mask, torch.zeros(shape[0], dtype=torch.int64))))
    assert torch.equal(result.kept_RT, mask)


def test_without_rules_nothing_is_rejected():
    assert kept([[1e9, None]]) == [[1, 0]]


def test_an_unknown_or_repeated_rule_is_an_error():
    with pytest.raises(KeyError, match="seq_max_k1"):
        judge([[1.0]], RejectionRule("seq_max_k1", 0.5, 2.0))
    with pytest.raises(ValueError, match="'token_k2' is there twice"):
        judge(
            [[1.0]],
            RejectionRule("token_k2", 0.0, 2.0),
            RejectionRule("token_k1", 0.5, 2.0),
            RejectionRule("token_k2", 0.0, 1.0),
        )
