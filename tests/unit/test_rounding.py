"""Numbers that differ only by rounding count as equal."""

import pytest
import torch

from workers.train.algorithms.gradient_losses import kl_cov
from workers.train.algorithms.grouping import Grouping, tolerant_difference
from workers.train.algorithms.losses import policy_loss  # noqa: F401  (registers all of them)
from workers.train.algorithms.normalization import whiten


@pytest.mark.parametrize(("dtype", "noise", "signal"), [(torch.float64, 1e-13, 1e-11), (torch.float32, 3e-7, 1e-5)])
def test_a_rounding_difference_becomes_0_and_any_other_is_unchanged(dtype, noise, signal):
    values = torch.tensor([-5.0, -5.0, 0.0, 2.0], dtype=dtype)
    baseline = torch.tensor([-5.0 * (1 + noise), -5.0 * (1 + signal), -1e-9, 1.0], dtype=dtype)
    result = tolerant_difference(values, baseline)
    assert result[0] == 0
    assert torch.equal(result[1:], (values - baseline)[1:])


@pytest.mark.parametrize("rewards", [(0.1, 0.2, 0.3), (0.7, 0.1, 0.4), (1 / 3, 2 / 3, 1.0)])
def test_a_reward_at_the_mean_of_its_group_is_exactly_0_in_any_order(rewards):
    mean = sum(rewards) / 3
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        ordered = torch.tensor([rewards[i] for i in order], dtype=torch.float64)
        centred = Grouping(torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool), 1).centred(ordered)
        at_mean = [abs(rewards[i] - mean) < 1e-9 for i in order]
        assert [float(value) == 0 for value in centred] == at_mean


def test_whitening_gives_exactly_0_to_a_value_at_the_mean():
    values = torch.tensor([0.4375, -0.4375, 0.0, 0.0], dtype=torch.float64)
    for order in ([0, 1, 2, 3], [2, 0, 3, 1], [3, 1, 0, 2]):
        ordered = values[order]
        weights = torch.tensor([4.0, 4.0, 3.0, 1.0])[order]
        result = whiten(ordered, torch.ones(4, dtype=torch.bool), weights, unbiased=True, epsilon=1e-8, shift=True)
        assert torch.equal(result == 0, ordered == 0)


def test_rounding_does_not_move_an_unchanged_policy():
    before = torch.tensor([[-1.0, -2.0, -3.0]])
    now = (before * (1 + 2e-7)).requires_grad_()
    kept = torch.ones_like(before, dtype=torch.bool)
    loss = kl_cov(now, before, torch.zeros_like(before), kept, kl_cov_coefficient=1.0).loss_RT.sum()
    loss.backward()
    assert torch.equal(now.grad, torch.zeros_like(before))
