"""Metrics of a rollout correction: how far apart the two policies are, what was rejected, how the weights look.

Names and definitions are verl's (rollout_corr_helper.py, without its prefix). In contrast to it, everything is over the
tokens of a mask and over completions that have one: padding, invalid rows and empty completions are in no mean. A mean
of nothing is left out. All values are float64 scalars; ratios are exp(clamp(log-ratio, ±20)).
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from workers.train.algorithms.importance import IMPORTANCE_LEVELS, ImportanceWeights, log_ratios
from workers.train.algorithms.ratios import clamp_log_ratio
from workers.train.algorithms.rejection import REJECTIONS, Rejection, RejectionTraits, k3
from workers.train.algorithms.sequences import Sequences

Metrics = dict[str, Tensor]

_LEAST: Final = 1e-300
"""What a divisor is at least: the weights it stands for are then all 0."""


def correction_metrics(
    old_logprobs_RT: Tensor,
    rollout_logprobs_RT: Tensor,
    mask_RT: Tensor,
    completion_ids_R: Tensor,
    *,
    rejection: Rejection | None = None,
    weights: ImportanceWeights | None = None,
) -> Metrics:
    """All that is known of one correction of one batch.

    Args:
        old_logprobs_RT: log-probs of the sampled tokens under the trainer's policy.
        rollout_logprobs_RT: the same, under the policy that sampled.
        mask_RT: bool, the tokens over which the policies are compared: those that survived, or those before rejection
            (as verl does) to see what the rules had to judge. What stands elsewhere may be anything.
        completion_ids_R: integers, the completion that each row belongs to; all of its rows are here.
        rejection: measured over the mask that it was given.
        weights: measured over the mask that they were given.
    """
    found = policy_metrics(old_logprobs_RT, rollout_logprobs_RT, mask_RT, completion_ids_R)
    if rejection is not None:
        found |= rejection_metrics(old_logprobs_RT, rollout_logprobs_RT, completion_ids_R, rejection)
    if weights is not None:
        found |= weight_metrics(completion_ids_R, weights)
    return found


def policy_metrics(
    old_logprobs_RT: Tensor, rollout_logprobs_RT: Tensor, mask_RT: Tensor, completion_ids_R: Tensor
) -> Metrics:
    """Perplexities of both policies and divergences between them; arguments as in `correction_metrics`.

    `training_ppl`, `rollout_ppl`, `ppl_ratio` (training by rollout), their logs and the differences of these are means,
    or extremes, over completions of exp(-mean log-prob of its tokens). `kl` and `k3_kl` estimate KL(rollout, training)
    over tokens by k1 and k3. `chi2_token` and `chi2_seq` are the mean squared ratio less 1, of tokens and completions.
    """
    if not bool(mask_RT.any()):
        return {}
    sequences = Sequences(mask_RT, completion_ids_R)
    present_S = sequences.lengths_S > 0
    train_S = sequences.mean(old_logprobs_RT.detach().double())[present_S]
    rollout_S = sequences.mean(rollout_logprobs_RT.detach().double())[present_S]
    log_ratio_RT = log_ratios(old_logprobs_RT, rollout_logprobs_RT, mask_RT)
    log_ratio_N, log_ratio_S = log_ratio_RT[mask_RT], sequences.sum(log_ratio_RT)[present_S]
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


def rejection_metrics(
    old_logprobs_RT: Tensor, rollout_logprobs_RT: Tensor, completion_ids_R: Tensor, rejection: Rejection
) -> Metrics:
    """What each rule saw and rejected, over the mask that `reject` was given; the other arguments are as it was given.

    For each rule `rollout_rs_NAME_*`: `masked_fraction` of tokens that it rejected and `seq_masked_fraction` of
    completions that lost one; then its statistic (k1, k2 or k3): `mean` over tokens, `max` and `min` over what it
    judges (tokens or completions), `std` over tokens after clamping to the bounds, `fraction_high` and `fraction_low`
    of what it judges, out of bounds, and `seq_*` the same over completions' means, with a sample standard deviation and
    the largest distance from 0. `m2po`, whose bound is on a mean, has no fraction out of bounds and no `seq_*`. Over
    all rules: `rollout_rs_masked_fraction` and `rollout_rs_seq_masked_fraction`.
    """
    mask_RT = rejection.mask_RT
    if not rejection.rules or not bool(mask_RT.any()):
        return {}
    sequences = Sequences(mask_RT, completion_ids_R)
    present_S = sequences.lengths_S > 0
    log_ratio_RT = clamp_log_ratio(log_ratios(old_logprobs_RT, rollout_logprobs_RT, mask_RT))
    found: Metrics = {}
    for rule, kept_RT in zip(rejection.rules, rejection.kept_by_rule_RT, strict=True):
        traits, limits = REJECTIONS[rule.name].traits, rule.bounds()
        statistic_RT = traits.statistic(log_ratio_RT, sequences).expand_as(mask_RT)
        over = _over_completions(sequences, uniform=traits.level == "sequence")
        values_N, values_S = statistic_RT[mask_RT], over(statistic_RT)[present_S]
        measured = _rule_metrics(values_N, values_S, traits, limits) | _masked_fractions(kept_RT, sequences)
        found |= {f"rollout_rs_{rule.name}_{name}": value for name, value in measured.items()}
    return found | {f"rollout_rs_{name}": v for name, v in _masked_fractions(rejection.kept_RT, sequences).items()}


def weight_metrics(completion_ids_R: Tensor, weights: ImportanceWeights) -> Metrics:
    """How the weights look, before they were normalised, over their own mask.

    `mean`, `std` and `eff_sample_size` (Kish's, as a fraction: (mean w)^2 / mean w^2) over tokens, of the weights
    within the bounds; `max` and `min` of these over tokens, but over completions before the bounds where a completion
    has one weight; `ratio_fraction_high` and `_low`: tokens, or completions, whose weight was out of bounds; the lower
    one is 1 / upper where there is none. `seq_*` is over completions' means, `seq_fraction_*` before the bounds.
    `oob_ratio`: tokens whose weight was zeroed. `batch_norm_factor`: what the weights were divided by.
    """
    mask_RT = weights.mask_RT
    if not bool(mask_RT.any()):
        return {}
    sequences = Sequences(mask_RT, completion_ids_R)
    present_S = sequences.lengths_S > 0
    raw_N, bounded_N = weights.raw_RT[mask_RT], weights.bounded_RT[mask_RT]
    by_completion = IMPORTANCE_LEVELS[weights.level].traits.unit == "completion"
    over = _over_completions(sequences, uniform=by_completion)
    raw_S, bounded_S = over(weights.raw_RT)[present_S], over(weights.bounded_RT)[present_S]
    judged, extremes = (raw_S, raw_S) if by_completion else (raw_N, bounded_N)
    lower = weights.lower if weights.lower > 0 or weights.out_of_range == "zero" else 1 / weights.upper
    found = {
        "mean": bounded_N.mean(),
        "std": bounded_N.std(correction=0),
        "max": extremes.max(),
        "min": extremes.min(),
        "eff_sample_size": bounded_N.mean().square() / bounded_N.square().mean().clamp(min=_LEAST),
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
        found["oob_ratio"] = _fraction((raw_N < weights.lower) | (raw_N > weights.upper))
    if weights.normalize:
        found["batch_norm_factor"] = weights.factor
    return {f"rollout_is_{name}": value for name, value in found.items()}


def _rule_metrics(values_N: Tensor, values_S: Tensor, traits: RejectionTraits, limits: tuple[float, float]) -> Metrics:
    """Of a rule's statistic, on tokens and as a completion's mean."""
    lower, upper = limits
    judged = values_S if traits.level == "sequence" else values_N
    found = {"mean": values_N.mean(), "max": judged.max(), "min": judged.min()}
    if traits.level == "batch":
        return found
    found |= {
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
        found["seq_fraction_low"] = _fraction(values_S < lower)
    return found


def _masked_fractions(kept_RT: Tensor, sequences: Sequences) -> Metrics:
    """Of the tokens of the mask, those that were not kept; of the completions that have one, those that lost one."""
    lost_RT = (~kept_RT).double()
    lost_S = sequences.sum(lost_RT)[sequences.lengths_S > 0] > 0
    return {"masked_fraction": lost_RT[sequences.mask_RT].mean(), "seq_masked_fraction": _fraction(lost_S)}


def _over_completions(sequences: Sequences, *, uniform: bool) -> Callable[[Tensor], Tensor]:
    """Mean over a completion's tokens; one that is the same on all of them is taken as it is, without rounding."""
    return sequences.max if uniform else sequences.mean


def _fraction(flags: Tensor) -> Tensor:
    return flags.double().mean()


def _sample_std(values: Tensor) -> Tensor:
    """With n - 1; 0 for a single value."""
    return values.std() if len(values) > 1 else torch.zeros_like(values[0])
