"""The critic's loss: reference values, and values outside the mask. A twin: test_twins_of_losses."""

import math

import pytest
import torch

from workers.train.algorithms.aggregation import BatchTotals, row_factors
from workers.train.algorithms.losses import value_loss

torch.set_num_threads(1)

VALUES = [[1.25, 1.625, -0.875, -0.125, 0.375], [1.625, 0.25, -0.25, 0.5, 2.25], [-1.375, 0.75, 1.125, -0.375, 0.0]]
RETURNS = [
    [0.25, 0.875, 0.625, -0.75, -0.5],
    [-1.125, -1.125, -1.25, 0.625, 1.375],
    [-1.25, 1.25, -0.25, -1.125, -0.75],
]
OLD = [[-1.0, -0.875, 0.0, -0.25, 0.375], [-1.0, 0.625, 1.5, 0.125, -1.125], [1.25, -1.25, -0.875, -0.75, 0.0]]
MASK = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 1, 1], [1, 1, 1, 0, 0]]).bool()
LENGTHS = torch.tensor([4, 4, 3])


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("token-mean", 1.2982954545), ("seq-mean-token-sum-norm", 0.9520833333), ("seq-mean-token-mean", 1.3274739546)],
)
@pytest.mark.parametrize("junk", [0.5, 1e30, math.nan, math.inf])
def test_loss_and_clip_fraction_equal_the_reference_with_any_values_outside_the_mask(aggregation, expected, junk):
    values, old, returns = (torch.tensor(t).double().masked_fill(~MASK, junk) for t in (VALUES, OLD, RETURNS))
    values.requires_grad_()
    factors_R = row_factors(aggregation, LENGTHS, BatchTotals(tokens=11, completions=3), constant=5)
    output = value_loss(values, old, returns, MASK, factors_R, clip=0.5)
    output.loss.backward()
    assert float(output.loss.detach()) == pytest.approx(expected)
    assert float(output.sums["value/clip_fraction"]) == 4
    assert float(output.sums["value/mean"]) == pytest.approx(float(torch.tensor(VALUES)[MASK].sum()))
    assert (values.grad[~MASK] == 0).all()
    assert torch.isfinite(values.grad).all()


def test_a_value_clipped_towards_its_return_has_no_gradient():
    now = torch.tensor([[1.0, -1.0]]).double().requires_grad_()
    zeros, mask, ones = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool), torch.ones(1).double()
    returns = torch.tensor([[2.0, 2.0]])
    clipped = value_loss(now, zeros, returns, mask, ones, clip=0.5)
    assert torch.autograd.grad(clipped.loss, now)[0].tolist() == [[0.0, -3.0]]
    assert float(clipped.loss.detach()) == 0.5 * (1.5**2 + 3.0**2)
    free = value_loss(now, zeros, returns, mask, ones, clip=math.inf)
    assert torch.autograd.grad(free.loss, now)[0].tolist() == [[-1.0, -3.0]]


def test_an_empty_mask_and_an_empty_batch_give_zero():
    for shape in ((2, 3), (0, 0), (2, 0)):
        junk = torch.full(shape, math.nan, requires_grad=True)
        nothing = torch.zeros(shape, dtype=torch.bool)
        output = value_loss(junk, junk.detach(), junk.detach(), nothing, torch.full(shape[:1], math.nan), clip=0.5)
        output.loss.backward()
        assert float(output.loss.detach()) == 0.0
        assert (junk.grad == 0).all()
