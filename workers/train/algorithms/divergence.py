"""Estimates of KL(policy, reference) from the log-probs of sampled tokens: a penalty for leaving the reference."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from workers.train.algorithms.ratios import clamp_log_ratio
from workers.train.algorithms.registry import Registry
from workers.train.algorithms.rounding import tolerant_difference

K3_BOUND: Final = 10.0
"""A k3 is at most this; above it there is no gradient."""


@dataclass(frozen=True, slots=True)
class DivergenceTraits:
    """What an estimator declares of itself."""

    non_negative: bool
    """No token's value is below 0."""
    straight_through: bool = False
    """Its gradient is that of k2, whose expectation is the gradient of the divergence; its value is its own."""


DIVERGENCES: Final[Registry[DivergenceTraits]] = Registry(
    "divergence",
    {
        "logprobs": "log-probs of the policy that is trained, with gradient; any shape",
        "reference": "log-probs of the reference policy, of the same shape, without gradient",
    },
)
"""By name, as `[algorithm] kl_divergence` says it. Each returns a value for every token.

In formulas d = logprobs - reference.
"""

SCHULMAN: Final = "Schulman 2020, Approximating KL divergence, joschu.net/blog/kl-approx.html"


def divergence(name: str, logprobs_RT: Tensor, reference_RT: Tensor, mask_RT: Tensor) -> Tensor:
    """The estimate for every token of the mask; exactly 0, with gradient exactly 0, elsewhere.

    Args:
        name: of the estimator.
        logprobs_RT: of the policy that is trained, with gradient.
        reference_RT: of the reference policy.
        mask_RT: bool, tokens that bear loss; elsewhere both may hold anything.

    Raises:
        KeyError: there is no such estimator.
    """
    logprobs = torch.where(mask_RT, logprobs_RT, 0.0)
    reference = torch.where(mask_RT, reference_RT.detach(), 0.0).to(logprobs.dtype)
    estimate: Tensor = DIVERGENCES[name]({"logprobs": logprobs, "reference": reference}, {})
    return estimate


@DIVERGENCES.register("k1", DivergenceTraits(non_negative=False), formula="d", source=SCHULMAN)
def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Unbiased, of either sign; its gradient is 0 on average, so it is for measuring."""
    return logprobs - reference


@DIVERGENCES.register("k2", DivergenceTraits(non_negative=True), formula="d^2 / 2", source=SCHULMAN)
def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Biased, of low variance; its gradient is that of the divergence."""
    return (logprobs - reference).square() / 2


@DIVERGENCES.register(
    "k3", DivergenceTraits(non_negative=True), formula="min(exp(-d) - 1 + d, 10), d clamped to ±20", source=SCHULMAN
)
def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Unbiased and never negative, bounded as verl bounds it."""
    distance = clamp_log_ratio(logprobs - reference)
    return (torch.expm1(-distance) + distance).clamp(0.0, K3_BOUND)


@DIVERGENCES.register("abs", DivergenceTraits(non_negative=True), formula="|d|", source="verl core_algos.kl_penalty")
def absolute(logprobs: Tensor, reference: Tensor) -> Tensor:
    """The distance of the log-probs."""
    return tolerant_difference(logprobs, reference).abs()


@DIVERGENCES.register(
    "k1+",
    DivergenceTraits(non_negative=False, straight_through=True),
    formula="value of k1, gradient of k2",
    source="verl core_algos.kl_penalty",
)
def k1_straight_through(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Unbiased in value and gradient."""
    return _with_gradient_of_k2(k1(logprobs, reference), logprobs, reference)


@DIVERGENCES.register(
    "k3+",
    DivergenceTraits(non_negative=True, straight_through=True),
    formula="value of k3, gradient of k2",
    source="verl core_algos.kl_penalty",
)
def k3_straight_through(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Unbiased in value and gradient, and never negative."""
    return _with_gradient_of_k2(k3(logprobs, reference), logprobs, reference)


@DIVERGENCES.register(
    "abs+",
    DivergenceTraits(non_negative=True, straight_through=True),
    formula="value of abs, gradient of k2",
    source="verl core_algos.kl_penalty",
)
def absolute_straight_through(logprobs: Tensor, reference: Tensor) -> Tensor:
    """The distance, with the gradient of the divergence."""
    return _with_gradient_of_k2(absolute(logprobs, reference), logprobs, reference)


def _with_gradient_of_k2(value: Tensor, logprobs: Tensor, reference: Tensor) -> Tensor:
    slope = (logprobs - reference).detach()
    # The second term is 0, and keeps the value as it is to the bit.
    return value.detach() + slope * (logprobs - logprobs.detach())
