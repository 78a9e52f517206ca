"""The code around the losses, and worked examples of each. References: conformance; gradients: test_twins_of_losses."""

import math

import pytest
import torch
from torch import Tensor

from tests.twins.losses import OPTIONS
from workers.train.algorithms.losses import LOSSES, LossInputs, policy_loss, value_loss
from workers.train.algorithms.sequences import Sequences

torch.set_num_threads(1)

MASK = [[1, 1, 1, 1, 0], [1, 1, 0, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]]
CLIPPED = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0, "level": "token"}

each_loss = pytest.mark.parametrize(
    ("name", "options"), [(name, options) for name in LOSSES for options in OPTIONS[name]]
)


def inputs(junk: float = 999.0) -> dict:
    """Make three valid rows of one completion each; the invalid row is filled with junk."""
    now, proximal = (torch.linspace(-3.0, end, 20).double().reshape(4, 5) for end in (-0.5, -0.25))
    advantages = torch.tensor([1.25, -0.75, 0.5, junk]).double().unsqueeze(1).repeat(1, 5)
    factors = torch.tensor([1 / 11, 1 / 11, 1 / 11, junk]).double()
    for tensor in (now, proximal):
        tensor[3] = junk
    return {
        "logprobs_RT": now.requires_grad_(),
        "proximal_RT": proximal,
        "advantages_RT": advantages,
        "mask_RT": torch.tensor(MASK).bool(),
        "completion_ids_R": torch.arange(4),
        "factors_R": factors,
    }


def run(name: str, given: dict, options: dict):
    return policy_loss(name, loss_inputs(given), given["factors_R"], options)


def loss_inputs(given: dict) -> LossInputs:
    given = {key: value for key, value in given.items() if key != "factors_R"}
    return LossInputs(sequences=Sequences(given.pop("mask_RT"), given.pop("completion_ids_R")), **given)


def one(value: float) -> Tensor:
    return torch.tensor([[value]], dtype=torch.float64)


def single(name: str, options: dict, *, logprob: float, proximal: float, advantage: float, **more: Tensor):
    """Return loss, gradient and output of one token."""
    now = one(logprob).requires_grad_()
    output = policy_loss(
        name,
        LossInputs(
            logprobs_RT=now,
            proximal_RT=one(proximal),
            advantages_RT=one(advantage),
            sequences=Sequences(torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, dtype=torch.int64)),
            **more,
        ),
        torch.ones(1, dtype=torch.float64),
        options,
    )
    return float(output.loss.detach()), float(torch.autograd.grad(output.loss, now)[0]), output


def test_weights_proximal_and_advantages_have_no_gradient():
    given = inputs() | {"weights_RT": torch.full((4, 5), 2.0).double()}
    names = ("weights_RT", "proximal_RT", "advantages_RT")
    for name in names:
        given[name].requires_grad_()
    run("clipped", given, CLIPPED).loss.backward()
    assert [given[name].grad for name in names] == [None] * 3


@each_loss
def test_at_the_proximal_policy_the_gradient_is_the_plain_policy_gradient(name, options):
    given = inputs(junk=0.5)
    given["proximal_RT"] = given["logprobs_RT"].detach().clone()
    run(name, given, options).loss.backward()
    expected = torch.where(given["mask_RT"], -given["advantages_RT"] / 11, 0.0)
    assert torch.allclose(given["logprobs_RT"].grad, expected)


def test_divergences_compare_policy_with_proximal_and_proximal_with_rollout():
    output = policy_loss(
        "reinforce",
        LossInputs(
            logprobs_RT=torch.tensor([[-1.0, -2.0, 7.0]]),
            proximal_RT=torch.tensor([[-1.5, -1.0, 7.0]]),
            advantages_RT=torch.ones(1, 3),
            sequences=Sequences(torch.tensor([[True, True, False]]), torch.zeros(1, dtype=torch.int64)),
        ),
        torch.ones(1).double(),
        {},
    )
    assert float(output.sums["kl/k1"]) == pytest.approx(0.5)
    assert float(output.sums["kl/k3"]) == pytest.approx((math.exp(0.5) - 1.5) + (math.exp(-1) - 1 + 1))
    assert float(output.sums["ratio/mean"]) == pytest.approx(math.exp(0.5) + math.exp(-1))
    assert float(output.maxima["ratio/max"]) == pytest.approx(math.exp(0.5))


def test_the_dual_clip_bounds_the_loss_of_a_token_with_negative_advantage():
    options = CLIPPED | {"dual_clip": 3.0}
    loss, gradient, output = single("clipped", options, logprob=-0.1, proximal=-2.1, advantage=-0.5)
    assert (loss, gradient) == (1.5, 0.0)
    assert float(output.sums["clip_fraction_lower"]) == 1
    loss, gradient, _ = single("clipped", options | {"dual_clip": 0.0}, logprob=-0.1, proximal=-2.1, advantage=-0.5)
    assert (loss, gradient) == pytest.approx((0.5 * math.exp(2), 0.5 * math.exp(2)))


def test_a_sequence_ratio_is_the_geometric_mean_over_all_rows_of_the_completion():
    now = torch.tensor([[-1.0, -1.0], [-1.0, 5.0]]).double().requires_grad_()
    given = {
        "logprobs_RT": now,
        "proximal_RT": torch.tensor([[-1.3, -1.0], [-1.0, 0.0]]).double(),
        "advantages_RT": torch.tensor([[1.0, 1.0], [1.0, 9.0]]).double(),
        "mask_RT": torch.tensor([[True, True], [True, False]]),
        "completion_ids_R": torch.tensor([7, 7]),
        "factors_R": torch.full((2,), 1 / 3).double(),
    }
    for name, options in (("clipped", CLIPPED | {"level": "sequence"}), ("gspo", {"clip_low": 0.2, "clip_high": 0.28})):
        output = run(name, given, options)
        (gradient,) = torch.autograd.grad(output.loss, now)
        assert float(output.loss.detach()) == pytest.approx(-math.exp(0.1))
        assert torch.allclose(gradient, torch.where(given["mask_RT"], -math.exp(0.1) / 3, 0.0).double())


def test_an_unknown_level_is_refused():
    with pytest.raises(ValueError, match="'token' or 'sequence'"):
        run("clipped", inputs(), CLIPPED | {"level": "batch"})


def test_cispo_keeps_the_gradient_of_a_token_whose_ratio_is_clipped():
    _, gradient, output = single("cispo", {"clip_low": 0.2, "clip_high": 0.28}, logprob=-1, proximal=-2, advantage=2.0)
    assert gradient == pytest.approx(-2 * 1.28)
    assert float(output.sums["clip_fraction"]) == 1


def test_dppo_masks_only_tokens_that_moved_too_far_in_the_direction_of_their_advantage():
    options = {"clip_low": 0.15, "clip_high": 0.15, "ratio_cap": 1.5}
    risen = {"logprob": math.log(0.5), "proximal": math.log(0.2)}
    for name in ("dppo_tv", "dppo_kl"):
        _, gradient, output = single(name, options, **risen, advantage=1.0)
        assert gradient == 0.0
        assert float(output.sums["clip_fraction"]) == 1
        _, gradient, output = single(name, options, **risen, advantage=-1.0)
        assert gradient == pytest.approx(1.5)
        assert float(output.sums["clip_fraction"]) == 0
        assert float(output.sums["clip_fraction_lower"]) == 1


def test_clip_cov_masks_selected_tokens_and_kl_cov_penalizes_them():
    chosen = {"selected_RT": torch.ones(1, 1, dtype=torch.bool)}
    token = {"logprob": -1.0, "proximal": -1.1, "advantage": 1.0}
    loss, gradient, output = single("clip_cov", {"clip_low": 0.2, "clip_high": 0.2}, **token, **chosen)
    assert (loss, gradient, float(output.sums["clip_fraction"])) == (0.0, 0.0, 1.0)
    loss, gradient, output = single("kl_cov", {"kl_cov_coefficient": 3.0}, **token, **chosen)
    assert (loss, gradient) == pytest.approx((-math.exp(0.1) + 0.3, -math.exp(0.1) + 3.0))
    assert float(output.sums["kl/abs"]) == pytest.approx(0.1)


def test_geo_mean_applies_the_geometric_mean_of_the_weights_once():
    weights = {"weights_RT": one(4.0)}
    loss, _, _ = single(
        "geo_mean", {"clip_low": 0.4, "clip_high": 0.4}, logprob=-1, proximal=-1, advantage=1, **weights
    )
    assert loss == pytest.approx(-4.0)


@each_loss
def test_a_micro_batch_without_loss_tokens_has_zero_loss_and_gradient(name, options):
    given = inputs(math.nan) | {"factors_R": torch.full((4,), math.nan).double()}
    output = run(name, given | {"mask_RT": torch.zeros(4, 5, dtype=torch.bool)}, options)
    output.loss.backward()
    assert float(output.loss.detach()) == 0.0
    assert (given["logprobs_RT"].grad == 0).all()
    assert {float(value) for value in (output.sums | output.maxima).values()} == {0.0}


def test_float32_log_probs_give_a_float64_loss_and_a_float32_gradient():
    given = inputs()
    now = given["logprobs_RT"].detach().float().requires_grad_()
    output = run("clipped", given | {"logprobs_RT": now}, CLIPPED)
    output.loss.backward()
    assert output.loss.dtype == torch.float64
    assert now.grad.dtype == torch.float32
    assert float(output.loss.detach()) == pytest.approx(float(run("clipped", given, CLIPPED).loss.detach()), rel=1e-6)


def test_every_loss_declares_formula_and_source():
    assert all(loss.formula and loss.source for loss in LOSSES.values())


def test_a_value_clipped_towards_its_return_has_no_gradient():
    now = torch.tensor([[1.0, -1.0]]).double().requires_grad_()
    zeros, mask, ones = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool), torch.ones(1).double()
    returns = torch.tensor([[2.0, 2.0]])
    clipped = value_loss(now, zeros, returns, mask, ones, clip=0.5)
    assert torch.autograd.grad(clipped.loss, now)[0].tolist() == [[0.0, -3.0]]
    assert float(clipped.loss.detach()) == 0.5 * (1.5**2 + 3.0**2)
    free = value_loss(now, zeros, returns, mask, ones, clip=math.inf)
    assert torch.autograd.grad(free.loss, now)[0].tolist() == [[-1.0, -3.0]]
