"""Metrics of a rollout correction: distance between the two policies, what was rejected, distribution of the weights.

Names and definitions follow verl (rollout_corr_helper.py, without its prefix). Unlike verl, every metric is over the
tokens of a mask and over completions with such a token: padding, invalid rows and empty completions enter no mean. A
mean over nothing is omitted. Values are float64 scalars; ratios are exp(clamp(log-ratio, ±20)).
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from workers.train.algorithms.correction import (
    IMPORTANCE_LEVELS,
    REJECTIONS,
    ImportanceWeights,
    Rejection,
    RejectionTraits,
    k3,
)
from workers.train.algorithms.sequences import LogRatios, Sequences, clamp_log_ratio

Metrics = dict[str, Tensor]

_MIN_DIVISOR: Final = 1e-300
"""Smallest divisor of the effective sample size; reached only if all weights are 0."""


def correction_metrics(
    old_logprobs_RT: Tensor,
    rollout_logprobs_RT: Tensor,
    log_ratios: LogRatios,
    *,
    rejection: Rejection | None = None,
    weights: ImportanceWeights | None = None,
) -> Metrics:
    """Return all metrics of one correction of one batch.

    Args:
        old_logprobs_RT: log-probs of the sampled tokens under the trainer's policy.
        rollout_logprobs_RT: the same under the policy that sampled.
        log_ratios: of these two, over the tokens that the policies are compared on: those that survived rejection, or
            those before it (as verl does).
        rejection: if rules were applied.
        weights: if there are importance weights.
    """
    metrics = policy_metrics(old_logprobs_RT, rollout_logprobs_RT, log_ratios)
    if rejection is not None:
        metrics |= rejection_metrics(rejection)
    if weights is not None:
        metrics |= weight_metrics(weights)
    return metrics


def policy_metrics(old_logprobs_RT: Tensor, rollout_logprobs_RT: Tensor, log_ratios: LogRatios) -> Metrics:
    """Return perplexities of both policies and divergences between them; arguments as in `correction_metrics`.

    `training_ppl`, `rollout_ppl`, `ppl_ratio` (training by rollout), their logs and the differences of these are means
    or extremes over completions of exp(-mean log-prob of its tokens). `kl` and `k3_kl` estimate KL(rollout, training)
    over tokens by k1 and k3. `chi2_token` and `chi2_seq` are the mean squared ratio minus 1, of tokens and completions.
    """
    sequences = log_ratios.sequences
    if not bool(sequences.mask_RT.any()):
        return {}
    present_S = sequences.lengths_S > 0
    train_S = sequences.mean(old_logprobs_RT.detach().double())[present_S]
    rollout_S = sequences.mean(rollout_logprobs_RT.detach().double())[present_S]
    log_ratio_N = log_ratios.values_RT[sequences.mask_RT]
    log_ratio_S = sequences.sum(log_ratios.values_RT)[present_S]
    difference_S = rollout_S - train_S
    return {
        "training_ppl": (-train_S).exp().mean(),
        "training_log_ppl": (-train_S).mean(),
        "rollout_ppl": (-rollout_S).exp().mean(),
        "rollout_log_ppl": (-rollout_S).mean(),
        "ppl_ratio": clamp_log_ratio(difference_S).exp().mean(),
        "log_ppl_diff": difference_S.mean(),
        "log_ppl_abs_diff": difference_S.abs().mean(),
        "log_ppl_diff_max": difference_S.max(),
        "log_ppl_diff_min": difference_S.min(),
        "kl": -log_ratio_N.mean(),
        "k3_kl": k3(clamp_log_ratio(log_ratio_N)).mean(),
        "chi2_token": clamp_log_ratio(log_ratio_N).exp().square().mean() - 1,
        "chi2_seq": clamp_log_ratio(log_ratio_S).exp().square().mean() - 1,
    }


def rejection_metrics(rejection: Rejection) -> Metrics:
    """Return what each rule measured and rejected, over the mask before rejection.

    For each rule `rollout_rs_NAME_*`: `masked_fraction` of tokens that it rejected and `seq_masked_fraction` of
    completions that lost one; then its statistic (k1, k2 or k3): `mean` over tokens, `max` and `min` over its units
    (tokens or completions), `std` over tokens after clamping to the bounds, `fraction_high` and `fraction_low` of units
    out of bounds, and `seq_*` the same over completion means, with a sample standard deviation and the largest distance
    from 0. `m2po` bounds a mean, so it has no fraction out of bounds and no `seq_*`. Over all rules:
    `rollout_rs_masked_fraction` and `rollout_rs_seq_masked_fraction`.
    """
    sequences = rejection.log_ratios.sequences
    mask_RT = sequences.mask_RT
    if not rejection.rules or not bool(mask_RT.any()):
        return {}
    present_S = sequences.lengths_S > 0
    log_ratio_RT = clamp_log_ratio(rejection.log_ratios.values_RT)
    metrics: Metrics = {}
    for rule, kept_RT in zip(rejection.rules, rejection.kept_by_rule_RT, strict=True):
        traits, bounds = REJECTIONS[rule.name].traits, rule.bounds()
        statistic_RT = traits.statistic(log_ratio_RT, sequences).expand_as(mask_RT)
        over = _over_completions(sequences, uniform=traits.level == "sequence")
        values_N, values_S = statistic_RT[mask_RT], over(statistic_RT)[present_S]
        measured = _rule_metrics(values_N, values_S, traits, bounds) | _masked_fractions(kept_RT, sequences)
        metrics |= {f"rollout_rs_{rule.name}_{name}": value for name, value in measured.items()}
    return metrics | {f"rollout_rs_{name}": v for name, v in _masked_fractions(rejection.kept_RT, sequences).items()}


def weight_metrics(weights: ImportanceWeights) -> Metrics:
    """Return the distribution of the weights before normalization, over their own mask.

    `mean`, `std` and `eff_sample_size` (Kish's, as a fraction: (mean w)^2 / mean w^2) over tokens, of the weights
    within the bounds; `max` and `min` of these over tokens, but over completions before the bounds where a completion
    has one weight; `ratio_fraction_high` and `_low`: tokens, or completions, whose weight was out of bounds; the lower
    bound counts as 1 / upper if there is none. `seq_*` is over completion means, `seq_fraction_*` before the bounds.
    `oob_ratio`: fraction of tokens whose weight was zeroed. `batch_norm_factor`: what the weights were divided by.
    """
    sequences = weights.log_ratios.sequences
    mask_RT = sequences.mask_RT
    if not bool(mask_RT.any()):
        return {}
    present_S = sequences.lengths_S > 0
    raw_N, bounded_N = weights.raw_RT[mask_RT], weights.bounded_RT[mask_RT]
    by_completion = IMPORTANCE_LEVELS[weights.level].traits.unit == "completion"
    over = _over_completions(sequences, uniform=by_completion)
    raw_S, bounded_S = over(weights.raw_RT)[present_S], over(weights.bounded_RT)[present_S]
    judged, extremes = (raw_S, raw_S) if by_completion else (raw_N, bounded_N)
    lower = weights.lower if weights.lower > 0 or weights.out_of_range == "zero" else 1 / weights.upper
    metrics = {
        "mean": bounded_N.mean(),
        "std": bounded_N.std(correction=0),
        "max": extremes.max(),
        "min": extremes.min(),
        "eff_sample_size": bounded_N.mean().square() / bounded_N.square().mean().clamp(min=_MIN_DIVISOR),
        "ratio_fraction_high": _fraction(judged > weights.upper),
        "ratio_fraction_low": _fraction(judged < lower),
        "seq_mean": bounded_S.mean(),
        "seq_std": _sample_std(bounded_S),
        "seq_max": bounded_S.max(),
        "seq_min": bounded_S.min(),
        "seq_max_deviation": (bounded_S - 1).abs().max(),
        "seq_fraction_high": _fraction(raw_S > weights.upper),
        "seq_fraction_low": _fraction(raw_S < lower),
    }
    if weights.out_of_range == "zero":
        metrics["oob_ratio"] = _fraction((raw_N < weights.lower) | (raw_N > weights.upper))
    if weights.normalize:
        metrics["batch_norm_factor"] = weights.normalizer
    return {f"rollout_is_{name}": value for name, value in metrics.items()}


def _rule_metrics(values_N: Tensor, values_S: Tensor, traits: RejectionTraits, bounds: tuple[float, float]) -> Metrics:
    """Return metrics of a rule's statistic, given its value per token and its mean per completion."""
    lower, upper = bounds
    judged = values_S if traits.level == "sequence" else values_N
    metrics = {"mean": values_N.mean(), "max": judged.max(), "min": judged.min()}
    if traits.level == "batch":
        return metrics
    metrics |= {
        "std": values_N.clamp(lower, upper).std(correction=0),
        "fraction_high": _fraction(judged > upper),
        "fraction_low": _fraction(judged < lower),
        "seq_mean": values_S.mean(),
        "seq_std": _sample_std(values_S),
        "seq_max": values_S.max(),
        "seq_min": values_S.min(),
        "seq_max_deviation": values_S.abs().max(),
        "seq_fraction_high": _fraction(values_S > upper),
    }
    if traits.two_sided:
        metrics["seq_fraction_low"] = _fraction(values_S < lower)
    return metrics


def _masked_fractions(kept_RT: Tensor, sequences: Sequences) -> Metrics:
    """Return the fraction of masked tokens that were not kept, and of completions that lost one."""
    lost_RT = (~kept_RT).double()
    lost_S = sequences.sum(lost_RT)[sequences.lengths_S > 0] > 0
    return {"masked_fraction": lost_RT[sequences.mask_RT].mean(), "seq_masked_fraction": _fraction(lost_S)}


def _over_completions(sequences: Sequences, *, uniform: bool) -> Callable[[Tensor], Tensor]:
    """Return the mean over a completion's tokens; a value that all its tokens share is taken without rounding."""
    return sequences.max if uniform else sequences.mean


def _fraction(flags: Tensor) -> Tensor:
    return flags.double().mean()


def _sample_std(values: Tensor) -> Tensor:
    """Return the standard deviation with n - 1; 0 for a single value."""
    return values.std() if len(values) > 1 else torch.zeros_like(values[0])
