"""Tokens picked out over the whole optimizer batch, once, from passes without gradient.

A selector looks at the batch's loss tokens together, so it cannot be asked by micro-batch or by rank; what it chose is
then handed to every part. On several ranks, ask it about the tokens of all of them.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from workers.train.algorithms.ratios import ratio
from workers.train.algorithms.registry import Registry

SELECTORS: Final[Registry[None]] = Registry(
    "selector",
    {
        "logprobs_N": "float64, log-probs of the policy that is trained, of the N loss tokens in order, N >= 1",
        "proximal_N": "float64, log-probs that ratios are taken against",
        "advantages_N": "float64",
        "generator": "torch.Generator for what is random, or None for torch's own",
    },
)
"""By name, as a loss's `LossTraits.selector` says it. Each returns bool, the tokens chosen.

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
    """Choose among the loss tokens of a whole optimizer batch.

    Args:
        name: of the selector.
        logprobs_RT: of the policy that is trained.
        proximal_RT: of the policy that ratios are taken against.
        advantages_RT: one for each token.
        mask_RT: bool, tokens that bear loss; elsewhere the three may hold anything.
        generator: for what is random; it is drawn from once for each loss token, whatever else the batch holds.
        options: by name; those of other functions are ignored.

    Returns:
        bool (R, T); False outside the mask.

    Raises:
        KeyError: there is no such selector, or one of its options is missing.
    """
    selector = SELECTORS[name]
    selected_RT = torch.zeros_like(mask_RT)
    if mask_RT.any():
        inputs = {
            "logprobs_N": logprobs_RT[mask_RT].double(),
            "proximal_N": proximal_RT[mask_RT].double(),
            "advantages_N": advantages_RT[mask_RT].double(),
            "generator": generator,
        }
        selected_RT[mask_RT] = selector(inputs, options)
    return selected_RT


@SELECTORS.register(
    "clip_cov",
    None,
    formula="max(1, ratio N) random tokens of those with low < cov < high that PPO's clip leaves alone",
    source="Cui et al. 2025, Clip-Cov, arXiv:2505.22617",
)
def clip_cov(
    logprobs_N: Tensor,
    proximal_N: Tensor,
    advantages_N: Tensor,
    generator: torch.Generator | None,
    *,
    clip_low: float,
    clip_high: float,
    clip_cov_ratio: float,
    clip_cov_low: float,
    clip_cov_high: float,
) -> Tensor:
    """Tokens whose gradient the loss `clip_cov` leaves out."""
    ratio_N = ratio(logprobs_N, proximal_N)
    # The clipped term is taken where it is the larger one.
    clipped_N = -advantages_N * ratio_N.clamp(1 - clip_low, 1 + clip_high) > -advantages_N * ratio_N
    covariance_N = _covariance(advantages_N, logprobs_N)
    candidate_N = (covariance_N > clip_cov_low) & (covariance_N < clip_cov_high) & ~clipped_N
    draw_N = torch.rand(len(logprobs_N), generator=generator, device=generator.device if generator else None)
    return _top_fraction(torch.where(candidate_N, draw_N.to(logprobs_N.device), -1.0), clip_cov_ratio) & candidate_N


@SELECTORS.register(
    "kl_cov",
    None,
    formula="the max(1, ratio N) tokens of the largest cov",
    source="Cui et al. 2025, KL-Cov, arXiv:2505.22617",
)
def kl_cov(logprobs_N: Tensor, advantages_N: Tensor, *, kl_cov_ratio: float) -> Tensor:
    """Tokens that the loss `kl_cov` penalises; of equal ones the first."""
    return _top_fraction(_covariance(advantages_N, logprobs_N), kl_cov_ratio)


@torch.no_grad()
def m2po(rollout_logprobs_RT: Tensor, proximal_RT: Tensor, mask_RT: Tensor, *, threshold: float) -> Tensor:
    """Tokens that are kept when those of the largest squared log-ratio go until the mean of the rest is below a bound.

    Tokens of equal value stand or fall together, so that their order does not matter; those of the smallest value
    stay, even where no mean is below the threshold.

    Source: Zheng et al. 2025, M2PO, arXiv:2510.01161; AReaL, _get_m2po_loss_mask.

    Args:
        rollout_logprobs_RT: log-probs of the policy that sampled.
        proximal_RT: log-probs of the trainer's policy when the batch was formed.
        mask_RT: bool, the tokens of the whole optimizer batch; elsewhere both may hold anything.
        threshold: of the mean of (log proximal / behaviour)^2 over the tokens kept.

    Returns:
        bool (R, T); False outside the mask.
    """
    log_ratio_RT = (
        torch.where(mask_RT, proximal_RT, 0.0).double() - torch.where(mask_RT, rollout_logprobs_RT, 0.0).double()
    )
    square_RT = torch.where(mask_RT, log_ratio_RT.square(), torch.inf)
    # One more, larger than any, so that there always is a first one that goes.
    rising = torch.cat([square_RT.flatten().sort().values, square_RT.new_full((1,), torch.inf)])
    mean = rising.cumsum(0) / torch.arange(1, len(rising) + 1, device=rising.device)
    first_to_go = rising[(mean < threshold).sum().clamp(max=len(rising) - 1)]
    return mask_RT & ((square_RT < first_to_go) | (square_RT == rising[0]))


def _covariance(advantages_N: Tensor, logprobs_N: Tensor) -> Tensor:
    return (advantages_N - advantages_N.mean()) * (logprobs_N - logprobs_N.mean())


def _top_fraction(values_N: Tensor, share: float) -> Tensor:
    """The largest `share` of the values, at least one; of equal ones the first."""
    number = max(1, int(share * len(values_N)))
    chosen_N = torch.zeros_like(values_N, dtype=torch.bool)
    chosen_N[values_N.argsort(descending=True, stable=True)[:number]] = True
    return chosen_N
