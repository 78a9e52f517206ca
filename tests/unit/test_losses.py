"""The clipped loss against hand-made values, a reference implementation and finite differences."""

import math

import pytest
import torch

from workers.train.losses import LOSSES, clipped

OLD = [
    [-2.0, -0.875, -1.25, -1.125, -0.875],
    [-2.625, -1.875, -2.25, -2.625, -1.5],
    [-1.25, -1.125, -2.5, -0.75, -0.5],
    [-1.125, -1.125, -1.25, -2.375, -1.625],
]
NEW = [
    [-2.75, -0.5, -1.25, -0.75, -1.625],
    [-2.25, -2.125, -1.625, -3.125, -1.375],
    [-1.25, -1.25, -2.625, -0.25, -1.25],
    [-0.5, -1.5, -0.625, -2.25, -1.625],
]
MASK = [[1, 1, 1, 1, 0], [1, 1, 0, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]]
WEIGHTS = [[1.0, 0.5, 2.0, 1.0, 1.0], [1.5, 1.0, 1.0, 0.25, 1.0], [1.0, 2.0, 0.75, 1.0, 1.0], [1.0] * 5]
# Row 3 is invalid; values of verl's vanilla loss, token mean, clip 0.2 and 0.28, without and with weights.
LOSS, WEIGHTED = -0.2983500175, -0.360651341
GRADIENT = [
    [-0.0536780174, 0.0, -0.1136363636, 0.0, 0.0],
    [0.0992039601, 0.0, 0.0, 0.0, 0.0772601218],
    [-0.0454545455, -0.0401134956, -0.0401134956, 0.0, 0.0],
    [0.0] * 5,
]
WEIGHTED_GRADIENT = [
    [-0.0536780174, 0.0, -0.2272727273, 0.0, 0.0],
    [0.1488059401, 0.0, 0.0, 0.0, 0.0772601218],
    [-0.0454545455, -0.0802269911, -0.0300851217, 0.0, 0.0],
    [0.0] * 5,
]


def inputs(junk=999.0):
    """Log-probs now, proximal, behaviour, advantages, mask; junk in the invalid row's every place."""
    now, proximal = torch.tensor(NEW).double(), torch.tensor(OLD).double()
    behaviour = proximal.clone()
    for tensor in (now, proximal, behaviour):
        tensor[3] = junk
    advantages = torch.tensor([1.25, -0.75, 0.5, junk]).double()
    return now.requires_grad_(), proximal, behaviour, advantages, torch.tensor(MASK).bool()


def options(**changes):
    return {"clip_low": 0.2, "clip_high": 0.28, "behaviour_cap": 100.0, "denominator": 11} | changes


@pytest.mark.parametrize("junk", [999.0, math.nan, math.inf, -math.inf])
def test_loss_and_gradient_are_those_of_the_reference_whatever_the_invalid_row_holds(junk):
    now, *rest = inputs(junk)
    output = clipped(now, *rest, **options())
    output.loss.backward()
    assert float(output.loss.detach()) == pytest.approx(LOSS)
    assert torch.allclose(now.grad, torch.tensor(GRADIENT).double(), atol=1e-9)
    assert (now.grad[3] == 0).all()
    assert float(output.sums["clip_fraction"]) / 11 == pytest.approx(4 / 11)


def test_weights_of_proximal_by_behaviour_are_those_of_the_reference():
    now, proximal, _, advantages, mask = inputs()
    behaviour = proximal - torch.tensor(WEIGHTS).double().log()
    output = clipped(now, proximal, behaviour, advantages, mask, **options())
    output.loss.backward()
    assert float(output.loss.detach()) == pytest.approx(WEIGHTED)
    assert torch.allclose(now.grad, torch.tensor(WEIGHTED_GRADIENT).double(), atol=1e-9)


def test_the_denominator_is_what_was_handed_in_not_what_is_here():
    now, *rest = inputs()
    assert float(clipped(now, *rest, **options(denominator=22)).loss.detach()) == pytest.approx(LOSS / 2)


def test_the_weight_is_truncated_and_bears_no_gradient():
    one = torch.ones(1, 1).double()
    now, proximal, behaviour = (one * -1.0).requires_grad_(), (one * -1.0).requires_grad_(), one * -4.0
    output = clipped(now, proximal, behaviour, one[0], one.bool(), **options(behaviour_cap=2.0, denominator=1))
    output.loss.backward()
    assert float(output.loss.detach()) == -2.0
    assert float(now.grad) == -2.0
    assert proximal.grad is None
    assert float(output.sums["weight/capped_fraction"]) == 1
    assert float(output.maxima["weight/max"]) == 2.0


def test_a_capped_token_cannot_blow_up_the_loss():
    one = torch.ones(1, 1).double()
    output = clipped(one * -0.1, one * -0.1, one * -400.0, one[0], one.bool(), **options(behaviour_cap=2.0))
    assert abs(float(output.loss)) <= 2.0 / 11
    uncapped = clipped(one * -0.1, one * -400.0, one * -400.0, -one[0], one.bool(), **options())
    assert math.isfinite(float(uncapped.loss))


def test_on_policy_the_gradient_is_that_of_plain_policy_gradient():
    now, *_, advantages, mask = inputs(junk=0.5)
    clipped(now, now.detach(), now.detach(), advantages, mask, **options()).loss.backward()
    expected = torch.where(mask, -advantages.unsqueeze(1) / 11, 0.0)
    assert torch.allclose(now.grad, expected)


def test_the_gradient_is_that_of_finite_differences():
    _, proximal, behaviour, advantages, mask = inputs(junk=0.25)
    behaviour = behaviour - 0.2
    point = (proximal + 0.07).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda now: clipped(now, proximal, behaviour, advantages, mask, **options()).loss, (point,)
    )


def test_divergences_are_measured_between_behaviour_and_proximal():
    proximal, behaviour = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
    output = clipped(proximal, proximal, behaviour, torch.ones(1), torch.ones(1, 2).bool(), **options(denominator=2))
    assert float(output.sums["kl/k1"]) == pytest.approx(0.5)
    assert float(output.sums["kl/k3"]) == pytest.approx(math.exp(0.5) - 1.5 + math.exp(-1))
    assert float(output.sums["ratio/mean"]) == 2.0


def test_a_part_without_a_loss_token_is_zero_with_zero_gradient():
    now, proximal, behaviour, advantages, mask = inputs(math.nan)
    output = clipped(now, proximal, behaviour, advantages, torch.zeros_like(mask), **options())
    output.loss.backward()
    assert float(output.loss.detach()) == 0.0
    assert (now.grad == 0).all()


def test_an_empty_part_is_zero():
    empty = torch.empty(0, 0)
    assert float(clipped(empty, empty, empty, torch.empty(0), empty.bool(), **options()).loss) == 0.0


def test_a_loss_takes_its_options_from_the_settings_by_name():
    assert LOSSES["clipped"].options == ("clip_low", "clip_high", "behaviour_cap")
