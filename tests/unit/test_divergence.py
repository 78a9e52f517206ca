"""Estimators of KL: reference values, bounds and declared traits. Twins: test_twins_of_losses."""

import math

import pytest
import torch

from workers.train.algorithms.divergence import DIVERGENCES, divergence

torch.set_num_threads(1)

NOW, REFERENCE = [-1.0, -0.5, -3.0, -0.1], [-1.2, -0.1, -1.0, -0.1]


@pytest.mark.parametrize(
    ("name", "values", "gradient"),
    [
        ("k1", [0.2, -0.4, -2.0, 0.0], [1.0, 1.0, 1.0, 1.0]),
        ("k2", [0.02, 0.08, 2.0, 0.0], [0.2, -0.4, -2.0, 0.0]),
        ("k3", [0.0187307531, 0.0918246976, 4.3890560989, 0.0], [0.1812692469, -0.4918246976, -6.3890560989, 0.0]),
        ("k3+", [0.0187307531, 0.0918246976, 4.3890560989, 0.0], [0.2, -0.4, -2.0, 0.0]),
        ("abs", [0.2, 0.4, 2.0, 0.0], [1.0, -1.0, -1.0, 0.0]),
    ],
)
def test_values_and_gradients_equal_the_reference(name, values, gradient):
    now = torch.tensor([NOW], dtype=torch.float64, requires_grad=True)
    result = divergence(name, now, torch.tensor([REFERENCE], dtype=torch.float64), torch.ones(1, 4, dtype=torch.bool))
    assert result.detach()[0].tolist() == pytest.approx(values, abs=1e-7)
    assert torch.autograd.grad(result.sum(), now)[0][0].tolist() == pytest.approx(gradient, abs=1e-7)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_ratios_of_a_hundred_give_finite_values_and_gradients(name, dtype):
    now = torch.tensor([[-1.0, -101.0]], dtype=dtype, requires_grad=True)
    result = divergence(name, now, torch.tensor([[-101.0, -1.0]], dtype=dtype), torch.ones(1, 2, dtype=torch.bool))
    (gradient,) = torch.autograd.grad(result.sum(), now)
    assert torch.isfinite(result).all()
    assert float(gradient.abs().max()) <= 100


def test_k3_is_at_most_ten():
    result = divergence("k3", torch.tensor([[-40.0]]), torch.tensor([[-1.0]]), torch.ones(1, 1, dtype=torch.bool))
    assert float(result) == 10.0


@pytest.mark.parametrize("name", [name for name, entry in DIVERGENCES.items() if entry.traits.straight_through])
def test_a_straight_through_estimator_has_its_own_value_and_the_gradient_of_k2(name):
    generator = torch.Generator().manual_seed(3)
    now = (torch.randn(1, 50, generator=generator) * 3).requires_grad_()
    reference, mask = torch.randn(1, 50, generator=generator) * 3, torch.ones(1, 50, dtype=torch.bool)
    result = divergence(name, now, reference, mask)
    assert torch.equal(result, divergence(name.removesuffix("+"), now, reference, mask))
    (gradient,) = torch.autograd.grad(result.sum(), now)
    assert torch.allclose(gradient, torch.autograd.grad(divergence("k2", now, reference, mask).sum(), now)[0])


@pytest.mark.parametrize("name", [name for name, entry in DIVERGENCES.items() if entry.traits.non_negative])
def test_divergences_declared_non_negative_are_non_negative(name):
    distances = torch.logspace(-20, 1, 2000)
    for distance in (distances, -distances):
        reference = torch.zeros_like(distance).unsqueeze(0)
        result = divergence(name, distance.unsqueeze(0), reference, torch.ones_like(reference, dtype=torch.bool))
        assert (result >= 0).all()


@pytest.mark.parametrize("name", DIVERGENCES)
def test_an_empty_mask_and_an_empty_batch_give_zero(name):
    junk = torch.full((2, 3), math.nan, requires_grad=True)
    result = divergence(name, junk, torch.full((2, 3), math.inf), torch.zeros(2, 3, dtype=torch.bool))
    assert (result == 0).all()
    assert (torch.autograd.grad(result.sum(), junk)[0] == 0).all()
    empty = torch.empty(0, 0)
    assert divergence(name, empty, empty, empty.bool()).shape == (0, 0)
