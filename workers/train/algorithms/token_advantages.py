"""Advantage estimators with one value per token: where in a completion its reward was earned.

They work on dense tensors (C, T): a completion's tokens in order on one line, tool tokens and holes in between (see
`completion_layout`). The mask holds the tokens of L. A position outside it is no time step: nothing is discounted over
it, no value is read from it, and it may hold anything.

Every estimator returns `TokenAdvantages` in float64, 0 outside the mask. None raises: an empty mask gives zeros.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from workers.train.algorithms.completion_layout import LeftPacking
from workers.train.algorithms.grouping import Grouping
from workers.train.algorithms.normalization import whiten_for_completions
from workers.train.algorithms.registry import ESTIMATORS, EstimatorTraits


class TokenAdvantages(NamedTuple):
    """Result of an estimator of level `token`; 0 outside the mask."""

    advantages_CT: Tensor
    """float64."""
    returns_CT: Tensor
    """float64, reward to go, the target of a critic. Never whitened."""


_BATCH_WIDE = EstimatorTraits(level="token", within_group=False, whitened=True)


@ESTIMATORS.register(
    "gae",
    _BATCH_WIDE,
    formula="A_t = d_t + discount lambda A_t+1, d_t = r_t + discount V_t+1 - V_t; returns A + V; A whitened",
    source="Schulman et al. 2015, arXiv:1506.02438, eq. 16; verl core_algos",
)
def gae(
    token_rewards_CT: Tensor,
    mask_CT: Tensor,
    values_CT: Tensor,
    bootstrap_C: Tensor,
    *,
    discount: float,
    gae_lambda: float,
    whiten: bool,
    center: str,
) -> TokenAdvantages:
    """Compute generalized advantage estimates.

    Args:
        token_rewards_CT: reward credited to each token.
        mask_CT: bool, tokens that count.
        values_CT: the critic's value before each token.
        bootstrap_C: the critic's value after a truncated completion; 0 after a real end.
        discount: of later rewards, per token that counts.
        gae_lambda: from one-step (0) to whole-episode (1) estimates.
        whiten: normalize the advantages to variance 1 over the batch's tokens.
        center: `completions` or `tokens`: of what the whitened advantages have mean 0; a completion counts with its
            first token.
    """
    rewards_TC, mask_TC = _time_major(token_rewards_CT, mask_CT), mask_CT.t().contiguous()
    values_TC = _time_major(values_CT, mask_CT)
    advantages_TC = torch.zeros_like(rewards_TC)
    later_C = torch.where(mask_CT.any(dim=1), bootstrap_C.double(), 0.0)
    advantage_C = torch.zeros_like(later_C)
    for t in range(len(mask_TC) - 1, -1, -1):
        error_C = rewards_TC[t] + discount * later_C - values_TC[t]
        advantage_C = torch.where(mask_TC[t], error_C + discount * gae_lambda * advantage_C, advantage_C)
        later_C = torch.where(mask_TC[t], values_TC[t], later_C)
        advantages_TC[t] = advantage_C
    return _masked_result(advantages_TC.t(), (advantages_TC + values_TC).t(), mask_CT, whiten=whiten, center=center)


@ESTIMATORS.register(
    "reinforce_plus_plus",
    _BATCH_WIDE,
    formula="A_t = G_t = r_t + discount G_t+1, whitened",
    source="Hu et al. 2025, arXiv:2501.03262; verl core_algos",
)
def reinforce_plus_plus(
    token_rewards_CT: Tensor, mask_CT: Tensor, *, discount: float, whiten: bool, center: str
) -> TokenAdvantages:
    """Compute the discounted reward to go.

    Args:
        token_rewards_CT: reward credited to each token.
        mask_CT: bool, tokens that count.
        discount: of later rewards, per token that counts.
        whiten: normalize the advantages to variance 1 over the batch's tokens.
        center: `completions` or `tokens`: of what the whitened advantages have mean 0; a completion counts with its
            first token.
    """
    rewards_TC, mask_TC = _time_major(token_rewards_CT, mask_CT), mask_CT.t().contiguous()
    returns_TC, return_C = torch.zeros_like(rewards_TC), rewards_TC.new_zeros(len(mask_CT))
    for t in range(len(mask_TC) - 1, -1, -1):
        return_C = torch.where(mask_TC[t], rewards_TC[t] + discount * return_C, return_C)
        returns_TC[t] = return_C
    return _masked_result(returns_TC.t(), returns_TC.t(), mask_CT, whiten=whiten, center=center)


@ESTIMATORS.register(
    "remax",
    EstimatorTraits(level="token", within_group=False),
    formula="A_t = sum of r from t on - greedy",
    source="Li et al. 2023, arXiv:2310.10505, eq. 6; verl core_algos",
)
def remax(token_rewards_CT: Tensor, mask_CT: Tensor, greedy_C: Tensor) -> TokenAdvantages:
    """Subtract the reward of a greedy rollout of the same prompt from the reward to go.

    Args:
        token_rewards_CT: reward credited to each token.
        mask_CT: bool, tokens that count.
        greedy_C: reward of the greedy rollout; anything for completions without a masked token.
    """
    returns_CT = _reward_to_go(token_rewards_CT, mask_CT)
    return TokenAdvantages(torch.where(mask_CT, returns_CT - greedy_C.double().unsqueeze(1), 0.0), returns_CT)


@ESTIMATORS.register(
    "optimal_token_baseline",
    EstimatorTraits(level="token"),
    formula="A_t = G_t - B_t, B_t = sum_i G_it W_it / (sum_i W_it + eps), W_t = sum_j<=t (1 - 2 pi + sum pi^2) w^2",
    source="Li et al. 2026, arXiv:2602.07078; verl core_algos",
)
def optimal_token_baseline(
    token_rewards_CT: Tensor,
    mask_CT: Tensor,
    groups: Grouping,
    old_logprobs_CT: Tensor,
    sum_pi_squared_CT: Tensor,
    weights_CT: Tensor,
    *,
    zero_tail: bool,
    epsilon: float,
) -> TokenAdvantages:
    """Subtract a baseline per position: the siblings' reward to go from there, weighted by their gradient energy.

    The energy is the running sum of 1 - 2 pi + sum pi^2, the squared norm of the gradient with respect to the logits at
    each token. A completion alone in its group has no baseline and keeps its reward to go.

    Args:
        token_rewards_CT: reward credited to each token.
        mask_CT: bool, tokens that count. A completion without any, or outside B, is no sibling of others.
        groups: of the completions.
        old_logprobs_CT: log-prob of each token.
        sum_pi_squared_CT: sum of the squared probabilities over the vocabulary at each token.
        weights_CT: importance weights; 1 where there are none.
        zero_tail: no baseline for the longest completion of a group beyond the length of the second longest.
        epsilon: added to the sum of weights.
    """
    mask_CT = mask_CT & groups.valid_C.unsqueeze(1)
    returns_CT = _reward_to_go(token_rewards_CT, mask_CT)
    energy_CT = _energy(mask_CT, old_logprobs_CT, sum_pi_squared_CT, weights_CT)
    baseline_CT = _baseline(returns_CT, energy_CT, mask_CT, groups, zero_tail=zero_tail, epsilon=epsilon)
    return TokenAdvantages(torch.where(mask_CT, returns_CT - baseline_CT, 0.0), returns_CT)


@ESTIMATORS.register(
    "tir_optimal_token_baseline",
    EstimatorTraits(level="token"),
    formula="as optimal_token_baseline, t counting masked tokens only",
    source="Li et al. 2026, arXiv:2602.07078; verl core_algos",
)
def tir_optimal_token_baseline(
    token_rewards_CT: Tensor,
    mask_CT: Tensor,
    groups: Grouping,
    old_logprobs_CT: Tensor,
    sum_pi_squared_CT: Tensor,
    weights_CT: Tensor,
    *,
    zero_tail: bool,
    epsilon: float,
) -> TokenAdvantages:
    """Compute `optimal_token_baseline` for tool use: compare the n-th sampled token with the siblings' n-th.

    Args:
        token_rewards_CT: reward credited to each token.
        mask_CT: bool, tokens that count. A completion without any, or outside B, is no sibling of others.
        groups: of the completions.
        old_logprobs_CT: log-prob of each token.
        sum_pi_squared_CT: sum of the squared probabilities over the vocabulary at each token.
        weights_CT: importance weights; 1 where there are none.
        zero_tail: no baseline for the tokens of a group's longest completion beyond the length of the second longest.
        epsilon: added to the sum of weights.
    """
    mask_CT = mask_CT & groups.valid_C.unsqueeze(1)
    packing, returns_CT = LeftPacking(mask_CT), _reward_to_go(token_rewards_CT, mask_CT)
    energy_CT = _energy(mask_CT, old_logprobs_CT, sum_pi_squared_CT, weights_CT)
    baseline_CN = _baseline(
        packing.pack(returns_CT),
        packing.pack(energy_CT),
        packing.mask_CN,
        groups,
        zero_tail=zero_tail,
        epsilon=epsilon,
    )
    return TokenAdvantages(torch.where(mask_CT, returns_CT - packing.unpack(baseline_CN), 0.0), returns_CT)


def _time_major(values_CT: Tensor, mask_CT: Tensor) -> Tensor:
    """Return float64 (T, C), 0 outside the mask, with each time step contiguous."""
    return torch.where(mask_CT.t(), values_CT.t().double(), 0.0).contiguous()


def _reward_to_go(token_rewards_CT: Tensor, mask_CT: Tensor) -> Tensor:
    """Return the sum of rewards from each token on; 0 outside the mask."""
    rewards_CT = torch.where(mask_CT, token_rewards_CT.double(), 0.0)
    return torch.where(mask_CT, rewards_CT.flip(1).cumsum(dim=1).flip(1), 0.0)


def _energy(mask_CT: Tensor, old_logprobs_CT: Tensor, sum_pi_squared_CT: Tensor, weights_CT: Tensor) -> Tensor:
    """Return W, the squared gradient norm summed up to each token; 0 outside the mask."""
    logprobs, squares, weights = (
        torch.where(mask_CT, x_CT.double(), 0.0) for x_CT in (old_logprobs_CT, sum_pi_squared_CT, weights_CT)
    )
    return torch.where(mask_CT, ((1 - 2 * logprobs.exp() + squares) * weights.square()).cumsum(dim=1), 0.0)


def _baseline(
    returns_CT: Tensor, energy_CT: Tensor, mask_CT: Tensor, groups: Grouping, *, zero_tail: bool, epsilon: float
) -> Tensor:
    """Return B, the W-weighted mean of the siblings' reward to go at each position; 0 for one without siblings."""
    siblings = Grouping(groups.codes_C, mask_CT.any(dim=1), groups.num_groups)
    baseline_GT = siblings.sum(returns_CT * energy_CT) / (siblings.sum(energy_CT) + epsilon)
    baseline_CT = siblings.broadcast(torch.where(siblings.count_G.unsqueeze(1) > 1, baseline_GT, 0.0))
    if not zero_tail:
        return baseline_CT
    length_C = mask_CT.sum(dim=1).double()
    second_C = siblings.broadcast(siblings.second_largest(length_C))
    position_T = torch.arange(mask_CT.shape[1], device=mask_CT.device)
    # Only the longest completion exceeds the second longest.
    tail_CT = (length_C > second_C).unsqueeze(1) & (position_T >= second_C.unsqueeze(1))
    return torch.where(tail_CT, 0.0, baseline_CT)


def _masked_result(
    advantages_CT: Tensor, returns_CT: Tensor, mask_CT: Tensor, *, whiten: bool, center: str
) -> TokenAdvantages:
    """Mask both, and whiten the advantages if `whiten`."""
    returns_CT = torch.where(mask_CT, returns_CT, 0.0)
    if not whiten:
        return TokenAdvantages(torch.where(mask_CT, advantages_CT, 0.0), returns_CT)
    first_CT = mask_CT & (mask_CT.cumsum(dim=1) == 1)
    return TokenAdvantages(whiten_for_completions(advantages_CT, mask_CT, None, first_CT, center=center), returns_CT)
