"""pass@k: known values, exact bounds, and full precision for large n."""

import math

import pytest
import torch

from workers.train.algorithms.pass_at_k import pass_at_k


def one(n: int, c: int, k: int) -> float:
    result = pass_at_k(torch.tensor(n), torch.tensor(c), k)
    assert bool(result.known)
    return float(result.value)


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [(1, 0, 1, 0.0), (4, 1, 4, 1.0), (8, 2, 1, 0.25), (8, 2, 2, 13 / 28), (8, 7, 2, 1.0), (16, 3, 8, 0.9)],
)
def test_pass_at_k_has_known_values(n, c, k, expected):
    assert one(n, c, k) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("n", [1, 7, 50, 1000])
def test_no_success_gives_exactly_0_and_fewer_than_k_failures_exactly_1(n):
    for k in range(1, min(n, 20) + 1):
        assert one(n, 0, k) == 0.0
        assert math.copysign(1.0, one(n, 0, k)) == 1.0
        assert one(n, n - k + 1, k) == 1.0


def test_large_n_loses_no_precision():
    assert one(10**9, 1, 1) == pytest.approx(1e-9, rel=1e-14)
    assert one(10**9, 1, 1000) == pytest.approx(1e-6, rel=1e-12)
    assert one(10**6, 10, 64) == pytest.approx(1 - math.comb(10**6 - 10, 64) / math.comb(10**6, 64), rel=1e-9)


def test_fewer_than_k_attempts_are_unknown():
    result = pass_at_k(torch.tensor([0, 3, 4, 5]), torch.tensor([0, 3, 1, 0]), 4)
    assert result.known.tolist() == [False, False, True, True]
    assert result.value.tolist() == [0.0, 0.0, 1.0, 0.0]


def test_the_result_has_the_shape_of_the_input():
    result = pass_at_k(torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64), 1)
    assert result.value.shape == result.known.shape == (2, 3)
    assert pass_at_k(torch.ones(0, dtype=torch.int64), torch.ones(0, dtype=torch.int64), 3).value.shape == (0,)


def test_k_is_at_least_1():
    with pytest.raises(ValueError, match="not 0"):
        pass_at_k(torch.tensor(1), torch.tensor(1), 0)
