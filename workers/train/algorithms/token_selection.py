"""Tokens selected once over the whole optimizer batch, from passes without gradient.

A selector looks at all loss tokens of the batch together, so it cannot run per micro-batch or per rank; every part then
receives its share of the selection.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from workers.train.algorithms.registry import Registry
from workers.train.algorithms.sequences import ratio


class LossTokens(NamedTuple):
    """Loss tokens of a whole optimizer batch in order, N >= 1; float64."""

    logprobs_N: Tensor
    """Log-probs of the policy in training."""
    proximal_N: Tensor
    """Log-probs that ratios are taken against."""
    advantages_N: Tensor

    @property
    def covariance_N(self) -> Tensor:
        """(A - mean A) (lp - mean lp) of each token."""
        return (self.advantages_N - self.advantages_N.mean()) * (self.logprobs_N - self.logprobs_N.mean())


SELECTORS: Final[Registry[None]] = Registry(
    "selector",
    {
        "tokens": "LossTokens of the whole optimizer batch",
        "generator": "torch.Generator for random choices, or None for torch's own",
    },
)
"""Selectors by the name in a loss's `LossTraits.selector`. Each returns bool (N), the tokens selected.

In formulas cov = (A - mean A) (lp - mean lp), over the batch's loss tokens.
"""


@torch.no_grad()
def select_tokens(
    name: str,
    logprobs_RT: Tensor,
    proximal_RT: Tensor,
    advantages_RT: Tensor,
    mask_RT: Tensor,
    generator: torch.Generator | None,
    options: Mapping[str, Any],
) -> Tensor:
    """Select among the loss tokens of a whole optimizer batch.

    Args:
        name: of the selector, in `SELECTORS`.
        logprobs_RT: of the policy in training.
        proximal_RT: of the policy that ratios are taken against.
        advantages_RT: one per token.
        mask_RT: bool, tokens that bear loss; elsewhere the three may hold anything.
        generator: for random choices; draws one number per loss token, whatever else the batch holds.
        options: by name; options of other functions are ignored.

    Returns:
        bool (R, T); False outside the mask.

    Raises:
        KeyError: unknown selector, or one of its options is missing.
    """
    selector = SELECTORS[name]
    selected_RT = torch.zeros_like(mask_RT)
    if mask_RT.any():
        tokens = LossTokens(*(x_RT[mask_RT].double() for x_RT in (logprobs_RT, proximal_RT, advantages_RT)))
        selected_RT[mask_RT] = selector({"tokens": tokens, "generator": generator}, options)
    return selected_RT


@SELECTORS.register(
    "clip_cov",
    None,
    formula="max(1, ratio N) random tokens of those with low < cov < high that PPO's clip leaves alone",
    source="Cui et al. 2025, Clip-Cov, arXiv:2505.22617",
)
def clip_cov(
    tokens: LossTokens,
    generator: torch.Generator | None,
    *,
    clip_low: float,
    clip_high: float,
    clip_cov_ratio: float,
    clip_cov_low: float,
    clip_cov_high: float,
) -> Tensor:
    """Select tokens whose gradient the loss `clip_cov` removes."""
    ratio_N = ratio(tokens.logprobs_N, tokens.proximal_N)
    # The clipped term is taken where it is larger.
    clipped_N = -tokens.advantages_N * ratio_N.clamp(1 - clip_low, 1 + clip_high) > -tokens.advantages_N * ratio_N
    covariance_N = tokens.covariance_N
    candidate_N = (covariance_N > clip_cov_low) & (covariance_N < clip_cov_high) & ~clipped_N
    draw_N = torch.rand(len(covariance_N), generator=generator, device=generator.device if generator else None)
    return _top_fraction(torch.where(candidate_N, draw_N.to(covariance_N.device), -1.0), clip_cov_ratio) & candidate_N


@SELECTORS.register(
    "kl_cov",
    None,
    formula="the max(1, ratio N) tokens of the largest cov",
    source="Cui et al. 2025, KL-Cov, arXiv:2505.22617",
)
def kl_cov(tokens: LossTokens, *, kl_cov_ratio: float) -> Tensor:
    """Select tokens that the loss `kl_cov` penalises; of equal ones the first."""
    return _top_fraction(tokens.covariance_N, kl_cov_ratio)


@torch.no_grad()
def m2po(rollout_logprobs_RT: Tensor, proximal_RT: Tensor, mask_RT: Tensor, *, threshold: float) -> Tensor:
    """Return the tokens left when those of largest squared log-ratio are removed until the mean of the rest is bounded.

    Tokens of equal value are kept or removed together, so their order does not matter; those of the smallest value
    stay, even if no mean is below the threshold.

    Source: Zheng et al. 2025, M2PO, arXiv:2510.01161; AReaL, _get_m2po_loss_mask.

    Args:
        rollout_logprobs_RT: log-probs of the policy that sampled.
        proximal_RT: log-probs of the trainer's policy when the batch was prepared.
        mask_RT: bool, the tokens of the whole optimizer batch; elsewhere both may hold anything.
        threshold: of the mean of (log proximal / rollout)^2 over the tokens kept.

    Returns:
        bool (R, T); False outside the mask.
    """
    rollout_RT = torch.where(mask_RT, rollout_logprobs_RT, 0.0).double()
    log_ratio_RT = torch.where(mask_RT, proximal_RT, 0.0).double() - rollout_RT
    square_RT = torch.where(mask_RT, log_ratio_RT.square(), torch.inf)
    # One more value, larger than any, so that there is always a first one to remove.
    rising = torch.cat([square_RT.flatten().sort().values, square_RT.new_full((1,), torch.inf)])
    mean = rising.cumsum(0) / torch.arange(1, len(rising) + 1, device=rising.device)
    first_removed = rising[(mean < threshold).sum().clamp(max=len(rising) - 1)]
    return mask_RT & ((square_RT < first_removed) | (square_RT == rising[0]))


def _top_fraction(values_N: Tensor, fraction: float) -> Tensor:
    """Return the largest `fraction` of the values, at least one; of equal ones the first."""
    number = max(1, int(fraction * len(values_N)))
    selected_N = torch.zeros_like(values_N, dtype=torch.bool)
    selected_N[values_N.argsort(descending=True, stable=True)[:number]] = True
    return selected_N
