"""The proximal policy without a forward pass of its own: between the one that sampled and the one that is trained."""

from typing import Final

import torch
from torch import Tensor

METHODS: Final = ("loglinear", "linear", "rollout")
"""`loglinear`: between log-probs; `linear`: between probabilities; `rollout`: the sampling policy's own."""


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
    """Log-probs of the proximal policy, taken to lie one version before the one that is trained.

    With a = (current - 1 - v) / (current - v), clamped to 0 ... 1, and 0 for tokens as young as the policy itself:
    `loglinear` gives (1 - a) lp_behaviour + a lp, `linear` gives log((1 - a) p_behaviour + a p).

    Source: AReaL, compute_prox_logp_approximations.

    Args:
        rollout_logprobs_RT: log-probs of the policy that sampled.
        logprobs_RT: log-probs of the policy that is trained; no gradient passes.
        versions_RT: integers, the policy version v that sampled each token; below 0 for none, and then a = 0.
        sampled_RT: bool, tokens that a policy sampled; elsewhere all three may hold anything.
        current_version: of the policy that is trained.
        method: one of `METHODS`.

    Returns:
        Log-probs in the dtype of `rollout_logprobs_RT`; 0 where nothing was sampled.

    Raises:
        ValueError: a method that does not exist.
    """
    if method not in METHODS:
        raise ValueError(f"there is no method {method!r}; use one of {', '.join(METHODS)}")
    behaviour = torch.where(sampled_RT, rollout_logprobs_RT, 0.0)
    if method == "rollout":
        return behaviour
    now = torch.where(sampled_RT, logprobs_RT, 0.0).to(behaviour.dtype)
    share = _interpolation_weight(torch.where(sampled_RT, versions_RT, -1), current_version).to(behaviour.dtype)
    if method == "loglinear":
        return behaviour + share * (now - behaviour)
    return torch.logaddexp(torch.log1p(-share) + behaviour, share.log() + now)


def _interpolation_weight(versions_RT: Tensor, current_version: int) -> Tensor:
    """How much of the way from the behaviour policy to the current one the proximal policy has gone; float64."""
    age_RT = current_version - versions_RT.double()
    share_RT = ((age_RT - 1) / age_RT.clamp(min=1)).clamp(0.0, 1.0)
    return torch.where(versions_RT >= 0, share_RT, 0.0)
