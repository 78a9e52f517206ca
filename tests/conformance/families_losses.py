"""Families of verl's losses: of the policy, of the value head, and the divergences between policies."""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from tests.conformance.cases import Case, family, named
from tests.conformance.corrections import Corrected, correct, expect_metrics
from tests.conformance.policies import LOSS_NAMES, case_row_factors, loss_of, loss_options
from workers.train.algorithms.divergence import DIVERGENCES
from workers.train.algorithms.losses import LossOutput, value_loss

METRIC_NAMES: Final = {
    "actor/pg_clipfrac": "clip_fraction",
    "actor/pg_clipfrac_lower": "clip_fraction_lower",
    "actor/ppo_kl": "kl/k1",
}
METRIC_NAMES_OF: Final = {"kl_cov": {"actor/ppo_kl": "kl/abs"}}
"""Where a loss means another number by a name."""
CORRECTION: Final = "rollout_corr/"
"""What the file puts before the names of the correction's metrics."""
DIVERGENCE_NAMES: Final = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


@family("policy_losses")
def policy_losses(case: Case) -> None:
    """Loss, gradient and metrics of a policy loss over the file's one batch."""
    check_policy_loss(case.with_shared("policy_loss_inputs"))


def check_policy_loss(case: Case, junk: Mapping[str, Tensor] | None = None) -> None:
    """Compare loss, gradient and metrics; with `junk` in place of inputs, where a case of the field asks for it."""
    inputs = {name: case.floats(name) for name in ("old_log_prob", "log_prob", "advantages")} | dict(junk or {})
    mask_RT = case.mask("mask") & case.mask("valid", [True] * len(case["mask"])).unsqueeze(1)
    logprobs_RT = inputs["log_prob"].clone().requires_grad_()
    if case["loss"] == "bypass_mode":
        output, mask_RT, corrected = _bypass(case, logprobs_RT, inputs, mask_RT)
    else:
        weights_RT = inputs.get("is_weights", _weights(case))
        output, corrected = _loss(case, case["loss"], logprobs_RT, inputs, mask_RT, weights_RT), None
    output.loss.backward()
    grad_RT = logprobs_RT.grad
    case.expect("expected_loss", output.loss)
    case.expect("expected_grad_log_prob", grad_RT)
    if (grad_RT[~mask_RT] != 0).any():
        case.refuse("expected_grad_log_prob", "not exactly 0 at a token that bears no loss")
    case.compared.add("expected_metrics")
    if corrected:
        expect_metrics(case, corrected.metrics, CORRECTION)
    for name, expected in case.get("expected_metrics", {}).items():
        if not (corrected and name.startswith(CORRECTION)):
            case.expect(f"expected_metrics.{name}", _metric(name, case["loss"], output, mask_RT), expected)


def _loss(
    case: Case,
    name: str,
    logprobs_RT: Tensor,
    inputs: Mapping[str, Tensor],
    mask_RT: Tensor,
    weights_RT: Tensor | None,
) -> LossOutput:
    config = case.get("config", {})
    return loss_of(
        LOSS_NAMES.get(name, name),
        logprobs_RT,
        proximal_RT=inputs["old_log_prob"],
        advantages_RT=inputs["advantages"],
        mask_RT=mask_RT,
        aggregation=case["agg"],
        info=case.get("info", {"loss_scale_factor": config.get("loss_scale_factor"), **config.get("info", {})}),
        options=loss_options(config),
        weights_RT=weights_RT,
    )


def _weights(case: Case) -> Tensor | None:
    """Null for none, the word for the shared ones, or numbers of the case's own."""
    weights = case.words.get("is_weights")
    if not isinstance(weights, str):
        return None if weights is None else case.tensor(weights)
    return case.tensor(case.file["policy_loss_inputs"][weights])


def _bypass(
    case: Case, logprobs_RT: Tensor, inputs: Mapping[str, Tensor], mask_RT: Tensor
) -> tuple[LossOutput, Tensor, Corrected]:
    """verl's losses without a recomputed proximal policy: corrected by the live policy against the engine's."""
    config = case["config"]["rollout_correction"]
    corrected = correct(logprobs_RT.detach(), inputs["old_log_prob"], mask_RT, config)
    weights_RT = corrected.weights.weights_RT if corrected.weights else None
    kinds = {"reinforce": ("reinforce", weights_RT), "ppo_clip": ("vanilla", None)}
    name, weights_RT = named(kinds, config.get("loss_type", "ppo_clip"), "loss_type")
    return _loss(case, name, logprobs_RT, inputs, corrected.kept_RT, weights_RT), corrected.kept_RT, corrected


def _metric(name: str, loss: str, output: LossOutput, mask_RT: Tensor) -> Tensor | None:
    """The metric of that name: a mean over loss tokens. A loss that never clips has none for what it clipped: 0."""
    ours = named({**METRIC_NAMES, **METRIC_NAMES_OF.get(loss, {})}, name, "metric")
    return _mean(
        {"clip_fraction": torch.zeros(()), "clip_fraction_lower": torch.zeros(()), **output.sums}, ours, mask_RT
    )


def _mean(sums: Mapping[str, Tensor], name: str, mask_RT: Tensor) -> Tensor | None:
    """A loss gives sums over its tokens; the file has their means."""
    return sums[name] / mask_RT.sum().clamp(min=1) if name in sums else None


@family("value_losses")
def value_losses(case: Case) -> None:
    """The clipped loss of a value head."""
    mask_RT = case.mask("mask") & case.mask("valid", [True] * len(case["mask"])).unsqueeze(1)
    values_RT = case.floats("vpreds").requires_grad_()
    output = value_loss(
        values_RT,
        case.floats("values"),
        case.floats("returns"),
        mask_RT,
        case_row_factors(case["agg"], mask_RT, case.get("info")),
        clip=float(case["cliprange_value"]),
    )
    case.expect("expected", output.loss)
    case.expect("clipfrac", _mean(output.sums, "value/clip_fraction", mask_RT))
    if "expected_grad" in case.words:
        output.loss.backward()
        case.expect("expected_grad", values_RT.grad)


@family("kl")
def kl(case: Case) -> None:
    """Value and gradient of a divergence's estimator, token by token."""
    name = case["estimator"].removesuffix("_clamped")
    straight = "+" if name.endswith("+") else ""
    base = name.removesuffix("+")
    ours = DIVERGENCE_NAMES.get(base, base)
    # k2 straight through is k2.
    divergence = named(DIVERGENCES, ours if ours == "k2" else ours + straight, "divergence")
    logprobs = case.floats("logprob").requires_grad_()
    value = divergence({"logprobs": logprobs, "reference": case.floats("ref_logprob")}, {})
    case.expect("expected", value)
    if "expected_grad" in case.words:
        value.sum().backward()
        case.expect("expected_grad", logprobs.grad)
