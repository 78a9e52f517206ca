"""Advantage estimators with one value per completion: how much better it was than its siblings.

Each is one pure function next to its formula. In the formulas r is a completion's reward, mean and std are those of its
group (sample standard deviation, n - 1), n is the number of completions of its group in B. Group statistics are over B,
batch statistics over L.

Every estimator returns float64, one value per completion: exactly 0.0 outside B, and 0 for a completion alone in its
group and for a group of equal rewards (before whitening). None raises: empty groups and batches give zeros.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from workers.train.algorithms.grouping import Grouping, tolerant_difference
from workers.train.algorithms.normalization import whiten_for_completions
from workers.train.algorithms.registry import ESTIMATORS, EstimatorTraits
from workers.train.algorithms.token_advantages import TokenAdvantages

__all__ = ["ESTIMATORS", "EstimatorTraits", "TokenAdvantages", "estimate"]

_CENTRED = EstimatorTraits(level="completion", mean_centred=True, shift_invariant=True, affine=True)
_SMALLEST = torch.finfo(torch.float64).tiny


def estimate(
    name: str, inputs: Mapping[str, Any], options: Mapping[str, Any], *, single_sample_policy: str
) -> Tensor | TokenAdvantages:
    """Estimate advantages by name, and apply the policy for groups with a single completion in B.

    Args:
        name: of the estimator.
        inputs: by the names in `ESTIMATORS.inputs`; those that the estimator does not need may be missing.
        options: of the estimator, by name.
        single_sample_policy: `raw` gives such a completion its own reward if the estimator's level is `completion`;
            any other policy leaves 0.

    Returns:
        Advantages (C), or those of tokens, depending on the estimator's level.

    Raises:
        KeyError: unknown estimator, or an input or option is missing.
    """
    estimator = ESTIMATORS[name]
    advantages: Tensor | TokenAdvantages = estimator(inputs, options)
    if single_sample_policy != "raw" or isinstance(advantages, TokenAdvantages):
        return advantages
    groups: Grouping = inputs["groups"]
    alone_C = groups.valid_C & groups.broadcast(groups.count_G == 1)
    return torch.where(alone_C, inputs["rewards_C"].double(), advantages)


@ESTIMATORS.register(
    "grpo",
    EstimatorTraits(level="completion", mean_centred=True, shift_invariant=True, scale_invariant=True, affine=True),
    formula="(r - mean) / (std + eps)",
    source="Shao et al. 2024, arXiv:2402.03300",
)
def grpo(rewards_C: Tensor, groups: Grouping, *, normalize_std: bool, leave_one_out: bool, epsilon: float) -> Tensor:
    """Compare with the group's mean, in its standard deviations.

    Args:
        rewards_C: rewards.
        groups: of the completions.
        normalize_std: divide by std + epsilon; otherwise return r - mean.
        leave_one_out: subtract the mean of the other completions: r - mean becomes n / (n - 1) (r - mean).
        epsilon: added to the standard deviation.
    """
    centred_C = groups.centred(rewards_C)
    advantages_C = _leave_one_out(centred_C, groups) if leave_one_out else centred_C
    return _divide_by_std(advantages_C, centred_C, groups, epsilon) if normalize_std else advantages_C


@ESTIMATORS.register("dr_grpo", _CENTRED, formula="r - mean", source="Liu et al. 2025, arXiv:2503.20783")
def dr_grpo(rewards_C: Tensor, groups: Grouping) -> Tensor:
    """Compare with the group's mean; used with an aggregation that divides by a constant."""
    return groups.centred(rewards_C)


@ESTIMATORS.register(
    "rloo",
    _CENTRED,
    formula="r - mean of the others = n / (n - 1) (r - mean)",
    source="Ahmadian et al. 2024, arXiv:2402.14740; Kool et al. 2019",
)
def rloo(rewards_C: Tensor, groups: Grouping) -> Tensor:
    """Compare with the mean of the other completions of the group."""
    return _leave_one_out(groups.centred(rewards_C), groups)


@ESTIMATORS.register(
    "reinforce_plus_plus_baseline",
    EstimatorTraits(level="completion", shift_invariant=True, affine=True, within_group=False, whitened=True),
    formula="whiten(r - mean): variance 1 over the batch's tokens, mean 0 over its completions (`center`) or tokens",
    source="Hu et al. 2025, arXiv:2501.03262; verl core_algos",
)
def reinforce_plus_plus_baseline(rewards_C: Tensor, groups: Grouping, loss_lengths_C: Tensor, *, center: str) -> Tensor:
    """Compare with the group's mean, then normalize to variance 1 over the tokens of L.

    Args:
        rewards_C: rewards.
        groups: of the completions.
        loss_lengths_C: tokens that bear loss.
        center: `completions` or `tokens`: what has mean 0.
    """
    return whiten_for_completions(
        groups.centred(rewards_C), groups.valid_C, loss_lengths_C, loss_lengths_C > 0, center=center
    )


@ESTIMATORS.register(
    "opo",
    EstimatorTraits(level="completion", shift_invariant=True, affine=True),
    formula="r - sum(length r) / sum(length)",
    source="Hao et al. 2025, arXiv:2505.23585",
)
def opo(rewards_C: Tensor, groups: Grouping, lengths_C: Tensor) -> Tensor:
    """Compare with the length-weighted mean of the group, the baseline of least variance if gradients grow with length.

    All advantages of a group without a token are 0.
    """
    shifted_C, length_G = groups.shift_by_max(rewards_C), groups.sum(lengths_C)
    baseline_G = groups.sum(lengths_C * shifted_C) / length_G.clamp(min=1)
    return torch.where(
        groups.valid_C & groups.broadcast(length_G > 0),
        tolerant_difference(shifted_C, groups.broadcast(baseline_G)),
        0.0,
    )


@ESTIMATORS.register(
    "gpg",
    EstimatorTraits(level="completion", mean_centred=True, affine=True, within_group=False),
    formula="alpha (r - mean) / f_norm, alpha = completions / completions with r != 0, in the batch",
    source="Chu et al. 2025, arXiv:2504.02546; verl core_algos",
)
def gpg(rewards_C: Tensor, groups: Grouping, loss_lengths_C: Tensor, *, f_norm: float) -> Tensor:
    """Compare with the group's mean, divided by the fraction of the batch (of L) whose reward is not 0.

    Args:
        rewards_C: rewards.
        groups: of the completions.
        loss_lengths_C: tokens that bear loss; completions without any do not count in alpha.
        f_norm: constant divisor.
    """
    counted_C = groups.valid_C & (loss_lengths_C > 0)
    alpha = counted_C.sum().double() / (counted_C & (rewards_C != 0)).sum().clamp(min=1)
    return groups.centred(rewards_C) * (alpha / f_norm)


@ESTIMATORS.register(
    "grpo_passk",
    EstimatorTraits(level="completion", shift_invariant=True, scale_invariant=True),
    formula="(r1 - r2) / (std + eps) for the best of the group, r1 and r2 its two largest rewards; 0 for the others",
    source="Tang et al. 2025, arXiv:2503.19595; verl core_algos",
)
def grpo_passk(rewards_C: Tensor, groups: Grouping, *, normalize_std: bool, epsilon: float) -> Tensor:
    """Give the best completion of a group its lead over the second best: 0 if two are tied for best.

    Args:
        rewards_C: rewards.
        groups: of the completions.
        normalize_std: divide by std + epsilon; otherwise return the lead itself.
        epsilon: added to the standard deviation.
    """
    # After the shift the best value is 0, and the lead is minus the maximum of the others.
    shifted_C = groups.shift_by_max(rewards_C)
    best_C = groups.valid_C & (shifted_C == 0)
    others_G = groups.max(torch.where(best_C, float("-inf"), shifted_C))
    lead_G = torch.where((groups.count_G > 1) & (groups.sum(best_C) == 1), -others_G, 0.0)
    advantages_C = torch.where(best_C, groups.broadcast(lead_G), 0.0)
    if not normalize_std:
        return advantages_C
    return _divide_by_std(advantages_C, groups.subtract_mean(shifted_C), groups, epsilon)


@ESTIMATORS.register(
    "passk",
    EstimatorTraits(level="completion", mean_centred=True),
    formula="right: (1 - p) / s; wrong: (1 - p - C(wrong - 1, k - 1) / C(n - 1, k - 1)) / s; "
    "p = 1 - C(wrong, k) / C(n, k), s = sqrt(p (1 - p))",
    source="Chen et al. 2025, arXiv:2508.10751",
)
def passk(groups: Grouping, correct_C: Tensor, *, k: int) -> Tensor:
    """Compare with the mean pass@k over all draws of k from the group, in its standard deviations.

    Args:
        groups: of the completions.
        correct_C: bool, right or wrong; anything outside B.
        k: number of attempts, of which one must be right. Groups with fewer completions in B get 0, and so do groups
            for which every draw of k passes, or none.
    """
    number_G, right_G = groups.count_G, groups.sum(correct_C)
    wrong_G = number_G - right_G
    failing_G = _failing_fraction(wrong_G, k, number_G)
    deviation_G = (failing_G * (1 - failing_G)).sqrt()
    defined_G = (number_G >= k) & (deviation_G > 0)
    right_advantage_G = failing_G / deviation_G
    # C(wrong - 1, k - 1) / C(n - 1, k - 1) = (n / wrong) C(wrong, k) / C(n, k)
    wrong_advantage_G = failing_G * (1 - number_G / wrong_G) / deviation_G
    advantages_C = torch.where(correct_C, groups.broadcast(right_advantage_G), groups.broadcast(wrong_advantage_G))
    return torch.where(groups.valid_C & groups.broadcast(defined_G), advantages_C, 0.0)


@ESTIMATORS.register(
    "gdpo",
    EstimatorTraits(level="completion", shift_invariant=True, within_group=False, whitened=True),
    formula="whiten(sum_p w_p (r_p - mean_p) / (std_p + eps)), as reinforce_plus_plus_baseline",
    source="Liu et al. 2026, arXiv:2601.05242; verl core_algos",
)
def gdpo(
    parts_PC: Tensor,
    has_part_PC: Tensor,
    part_weights_P: Tensor,
    groups: Grouping,
    loss_lengths_C: Tensor,
    *,
    epsilon: float,
    center: str,
) -> Tensor:
    """Apply GRPO to each part of the reward, add up by weight, then normalize over the tokens of L.

    Args:
        parts_PC: parts of the rewards.
        has_part_PC: bool, parts that a completion has; it is compared in these only.
        part_weights_P: weight of each part.
        groups: of the completions.
        loss_lengths_C: tokens that bear loss.
        epsilon: added to each standard deviation.
        center: `completions` or `tokens`: what has mean 0.
    """
    total_C = torch.zeros_like(groups.valid_C, dtype=torch.float64)
    for part_C, has_C, weight in zip(parts_PC, has_part_PC, part_weights_P.double(), strict=True):
        having = Grouping(groups.codes_C, groups.valid_C & has_C, groups.num_groups)
        total_C += weight * grpo(part_C, having, normalize_std=True, leave_one_out=False, epsilon=epsilon)
    return whiten_for_completions(total_C, groups.valid_C, loss_lengths_C, loss_lengths_C > 0, center=center)


@ESTIMATORS.register(
    "max_rl",
    EstimatorTraits(level="completion", mean_centred=True, affine=True),
    formula="(r - mean) / (mean + eps)",
    source="Tajwar et al. 2026, arXiv:2602.02710",
)
def max_rl(rewards_C: Tensor, groups: Grouping, *, epsilon: float) -> Tensor:
    """Compare with the group's mean, in units of it: the gradient of log pass rate up to order n for r of 0 or 1.

    Args:
        rewards_C: rewards, not negative. A group whose mean is not above 0 gets 0, because dividing by a negative mean
            would flip every sign.
        groups: of the completions.
        epsilon: added to the mean.
    """
    mean_G = groups.mean(rewards_C)
    scale_G = torch.where(mean_G > 0, 1 / (mean_G + epsilon), 0.0)
    return groups.centred(rewards_C) * groups.broadcast(scale_G)


def _leave_one_out(centred_C: Tensor, groups: Grouping) -> Tensor:
    """Convert deviations from the mean of all into deviations from the mean of the others."""
    return centred_C * groups.broadcast(groups.count_G / (groups.count_G - 1).clamp(min=1))


def _divide_by_std(advantages_C: Tensor, centred_C: Tensor, groups: Grouping, epsilon: float) -> Tensor:
    """Divide by the group's standard deviation plus epsilon."""
    return advantages_C / groups.broadcast((groups.std(centred_C) + epsilon).clamp(min=_SMALLEST))


def _failing_fraction(wrong_G: Tensor, k: int, number_G: Tensor) -> Tensor:
    """Return C(wrong, k) / C(n, k), the fraction of draws of k without a right one; 0 with fewer than k wrong."""
    ways_G = [torch.lgamma(n_G + 1) - torch.lgamma((n_G - k).clamp(min=0) + 1) for n_G in (wrong_G, number_G)]
    return torch.where(wrong_G >= k, (ways_G[0] - ways_G[1]).exp(), 0.0)
