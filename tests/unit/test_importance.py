"""Importance weights on batches small enough to compute by hand."""

import math

import pytest
import torch
from torch import Tensor

from workers.train.algorithms.correction import IMPORTANCE_LEVELS, ImportanceWeights, importance_weights
from workers.train.algorithms.sequences import Sequences, log_ratios

E20 = math.exp(20)
OFF = {"lower": 0.0, "upper": math.inf, "out_of_range": "truncate", "normalize": False}


def weigh(ratios: list[list[float]], ids: list[int] | None = None, **options) -> ImportanceWeights:
    """Make a batch with the ratio of each token; None is outside the mask."""
    known = torch.tensor([[r is not None for r in row] for row in ratios])
    train = torch.tensor([[math.log(r) if r else math.nan for r in row] for row in ratios], dtype=torch.float64)
    rollout = torch.zeros_like(train)
    return importance_weights(
        log_ratios(train, rollout, Sequences(known, torch.tensor(ids or range(len(ratios))))), **{**OFF, **options}
    )


def lists(tensor: Tensor) -> list[list[float]]:
    return [[round(value, 9) for value in row] for row in tensor.tolist()]


def test_a_token_has_its_own_ratio():
    assert lists(weigh([[2.0, 0.5], [3.0, None]], level="token").weights_RT) == [[2.0, 0.5], [3.0, 0.0]]


def test_a_completion_has_the_product_over_all_of_its_rows():
    result = weigh([[2.0, 3.0], [0.5, None], [4.0, None]], [7, 5, 7], level="sequence")
    assert lists(result.weights_RT) == [[24.0, 24.0], [0.5, 0.0], [24.0, 0.0]]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"upper": 2.0}, [0.1, 1.5, 2.0]),
        ({"upper": 2.0, "lower": 0.5}, [0.5, 1.5, 2.0]),
        ({"upper": 2.0, "lower": 0.5, "out_of_range": "zero"}, [0.0, 1.5, 0.0]),
        ({"upper": 2.0, "out_of_range": "zero"}, [0.1, 1.5, 0.0]),
    ],
)
def test_weights_outside_the_bounds_are_truncated_or_zeroed(options, expected):
    assert lists(weigh([[0.1, 1.5, 3.0]], level="token", **options).weights_RT) == [expected]


def test_a_completion_in_two_rows_counts_once_in_the_mean():
    result = weigh([[2.0], [2.0], [1.0]], [0, 0, 1], level="sequence", normalize=True)
    assert lists(result.weights_RT) == [[1.6], [1.6], [0.4]]  # 4, 4 and 1, divided by (4 + 1) / 2


def test_weights_are_bounded_before_they_are_averaged():
    assert float(weigh([[9.0, 1.0]], level="token", upper=3.0, normalize=True).normalizer) == pytest.approx(2.0)


def test_zeroed_weights_count_in_the_mean():
    result = weigh([[9.0, 1.0]], level="token", upper=3.0, out_of_range="zero", normalize=True)
    assert lists(result.weights_RT) == [[0.0, 2.0]]


def test_all_zero_weights_are_not_normalized():
    result = weigh([[9.0, 9.0]], level="token", upper=3.0, out_of_range="zero", normalize=True)
    assert (lists(result.weights_RT), float(result.normalizer)) == ([[0.0, 0.0]], 1.0)


@pytest.mark.parametrize("level", IMPORTANCE_LEVELS)
@pytest.mark.parametrize(("log_ratio", "expected"), [(100.0, E20), (-100.0, 1 / E20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_log_ratio_of_100_gives_exp_20(level, log_ratio, expected, dtype):
    train = torch.full((2, 3), log_ratio, dtype=dtype, requires_grad=True)
    mask = torch.ones(2, 3, dtype=torch.bool)
    result = importance_weights(
        log_ratios(train, torch.zeros(2, 3, dtype=dtype), Sequences(mask, torch.arange(2))), level=level, **OFF
    )
    assert result.weights_RT.dtype == torch.float64
    assert not result.weights_RT.requires_grad
    assert result.weights_RT.flatten().tolist() == pytest.approx([expected] * 6, rel=1e-6)


def test_an_unknown_option_is_an_error():
    with pytest.raises(KeyError, match="geometric"):
        weigh([[1.0]], level="geometric")
    with pytest.raises(ValueError, match="'clip'"):
        weigh([[1.0]], level="token", out_of_range="clip")


def test_log_ratios_have_no_gradient_and_are_0_outside_the_mask():
    train = torch.tensor([[1.0, math.nan, math.inf]], requires_grad=True)
    sequences = Sequences(torch.tensor([[True, False, False]]), torch.tensor([0]))
    result = log_ratios(train, torch.tensor([[0.25, -math.inf, math.inf]]), sequences).values_RT
    assert (result.tolist(), result.dtype, result.requires_grad) == ([[0.75, 0.0, 0.0]], torch.float64, False)
