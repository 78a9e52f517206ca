"""Proximal log-probs without a forward pass: interpolated between the sampling policy and the policy in training."""

from typing import Final

import torch
from torch import Tensor

METHODS: Final = ("loglinear", "linear", "rollout")
"""`loglinear` interpolates log-probs, `linear` probabilities; `rollout` takes the sampling policy's log-probs."""


@torch.no_grad()
def interpolate_logprobs(
    rollout_logprobs_RT: Tensor,
    logprobs_RT: Tensor,
    versions_RT: Tensor,
    sampled_RT: Tensor,
    current_version: int,
    *,
    method: str,
) -> Tensor:
    """Return log-probs of a proximal policy assumed to be one version older than the policy in training.

    With a = (current - 1 - v) / (current - v), clamped to 0 ... 1, and 0 for tokens sampled by the current version:
    `loglinear` gives (1 - a) lp_rollout + a lp, `linear` gives log((1 - a) p_rollout + a p).

    Source: AReaL, compute_prox_logp_approximations.

    Args:
        rollout_logprobs_RT: log-probs of the policy that sampled.
        logprobs_RT: log-probs of the policy in training; no gradient passes.
        versions_RT: integers, the policy version v that sampled each token; a = 0 for negative ones.
        sampled_RT: bool, tokens that a policy sampled; elsewhere all three may hold anything.
        current_version: version of the policy in training.
        method: one of `METHODS`.

    Returns:
        Log-probs in the dtype of `rollout_logprobs_RT`; 0 where nothing was sampled.

    Raises:
        ValueError: unknown method.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; use one of {', '.join(METHODS)}")
    rollout = torch.where(sampled_RT, rollout_logprobs_RT, 0.0)
    if method == "rollout":
        return rollout
    now = torch.where(sampled_RT, logprobs_RT, 0.0).to(rollout.dtype)
    share = _interpolation_weight(torch.where(sampled_RT, versions_RT, -1), current_version).to(rollout.dtype)
    if method == "loglinear":
        return rollout + share * (now - rollout)
    return torch.logaddexp(torch.log1p(-share) + rollout, share.log() + now)


def _interpolation_weight(versions_RT: Tensor, current_version: int) -> Tensor:
    """Return a, how far the proximal policy is from the sampling policy towards the current one; float64."""
    age_RT = current_version - versions_RT.double()
    share_RT = ((age_RT - 1) / age_RT.clamp(min=1)).clamp(0.0, 1.0)
    return torch.where(versions_RT >= 0, share_RT, 0.0)
