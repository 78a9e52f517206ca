"""Estimators of KL at their bounds. Values and gradients: conformance and test_twins_of_losses."""

import math

import pytest
import torch

from workers.train.algorithms.divergence import DIVERGENCES, divergence

torch.set_num_threads(1)


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
