"""Estimators of KL(policy, reference) from log-probs of sampled tokens, used as a penalty on the loss."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from workers.train.algorithms.grouping import tolerant_difference
from workers.train.algorithms.registry import Registry
from workers.train.algorithms.sequences import clamp_log_ratio

K3_BOUND: Final = 10.0
"""Upper bound of k3; the gradient is 0 beyond it."""


@dataclass(frozen=True, slots=True)
class DivergenceTraits:
    """Declared properties of an estimator."""

    non_negative: bool
    """Every token's value is 0 or more."""
    straight_through: bool = False
    """The gradient is that of k2, whose expectation is the gradient of the divergence; the value is the estimator's."""


DIVERGENCES: Final[Registry[DivergenceTraits]] = Registry(
    "divergence",
    {
        "logprobs": "log-probs of the policy in training, with gradient; any shape",
        "reference": "log-probs of the reference policy, of the same shape, without gradient",
    },
)
"""Estimators by the name in `[algorithm] kl_divergence`. Each returns a value for every token.

In formulas d = logprobs - reference.
"""

SCHULMAN: Final = "Schulman 2020, Approximating KL divergence, joschu.net/blog/kl-approx.html"


def divergence(name: str, logprobs_RT: Tensor, reference_RT: Tensor, mask_RT: Tensor) -> Tensor:
    """Estimate the divergence at every masked token; value and gradient are exactly 0 elsewhere.

    Args:
        name: of the estimator.
        logprobs_RT: of the policy in training, with gradient.
        reference_RT: of the reference policy.
        mask_RT: bool, tokens that bear loss; elsewhere both may hold anything.

    Raises:
        KeyError: unknown estimator.
    """
    logprobs = torch.where(mask_RT, logprobs_RT, 0.0)
    reference = torch.where(mask_RT, reference_RT.detach(), 0.0).to(logprobs.dtype)
    estimate: Tensor = DIVERGENCES[name]({"logprobs": logprobs, "reference": reference}, {})
    return estimate


@DIVERGENCES.register("k1", DivergenceTraits(non_negative=False), formula="d", source=SCHULMAN)
def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return d: unbiased, of either sign. Its gradient is 0 on average, so it is for measuring only."""
    return logprobs - reference


@DIVERGENCES.register("k2", DivergenceTraits(non_negative=True), formula="d^2 / 2", source=SCHULMAN)
def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return d^2 / 2: biased, low variance. Its gradient is that of the divergence."""
    return (logprobs - reference).square() / 2


@DIVERGENCES.register(
    "k3", DivergenceTraits(non_negative=True), formula="min(exp(-d) - 1 + d, 10), d clamped to ±20", source=SCHULMAN
)
def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return exp(-d) - 1 + d: unbiased, never negative, bounded as in verl."""
    distance = clamp_log_ratio(logprobs - reference)
    return (torch.expm1(-distance) + distance).clamp(0.0, K3_BOUND)


@DIVERGENCES.register("abs", DivergenceTraits(non_negative=True), formula="|d|", source="verl core_algos.kl_penalty")
def absolute(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return |d|."""
    return tolerant_difference(logprobs, reference).abs()


@DIVERGENCES.register(
    "k1+",
    DivergenceTraits(non_negative=False, straight_through=True),
    formula="value of k1, gradient of k2",
    source="verl core_algos.kl_penalty",
)
def k1_straight_through(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return the value of k1 with the gradient of k2: unbiased in both."""
    return _with_gradient_of_k2(k1(logprobs, reference), logprobs, reference)


@DIVERGENCES.register(
    "k3+",
    DivergenceTraits(non_negative=True, straight_through=True),
    formula="value of k3, gradient of k2",
    source="verl core_algos.kl_penalty",
)
def k3_straight_through(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return the value of k3 with the gradient of k2: unbiased in both, never negative."""
    return _with_gradient_of_k2(k3(logprobs, reference), logprobs, reference)


@DIVERGENCES.register(
    "abs+",
    DivergenceTraits(non_negative=True, straight_through=True),
    formula="value of abs, gradient of k2",
    source="verl core_algos.kl_penalty",
)
def absolute_straight_through(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return |d| with the gradient of k2."""
    return _with_gradient_of_k2(absolute(logprobs, reference), logprobs, reference)


def _with_gradient_of_k2(value: Tensor, logprobs: Tensor, reference: Tensor) -> Tensor:
    slope = (logprobs - reference).detach()
    # The second term is exactly 0, so the value keeps every bit.
    return value.detach() + slope * (logprobs - logprobs.detach())
