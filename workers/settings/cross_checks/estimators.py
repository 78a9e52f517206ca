"""Checks of `[filter]`, `[estimator]` and what `[algorithm]` does to rewards."""

from collections.abc import Iterator

from workers.settings.estimators import OptimalTokenBaseline, Passk, TirOptimalTokenBaseline
from workers.settings.settings import Settings

_CHOOSES_OVER_BATCH = ("clip_cov", "kl_cov")
"""Losses that choose tokens of the whole batch."""
_REWARD_CHANGES = ("reward_clip", "overlong_penalty", "reward_normalization")


def check_filters(s: Settings) -> Iterator[str]:
    """`[filter]`: some groups pass, and the estimator supports the bounds."""
    if s.min_valid_rows > s.rollout.group_size:
        yield (
            f"filter.min_valid_rows ({s.min_valid_rows}; at least 2 unless set) is more than rollout.group_size "
            f"({s.rollout.group_size}), so every group would be dropped; lower the first or raise the second"
        )
    for key in ("mean_reward_range", "advantage_range"):
        low, high = getattr(s.filter, key)
        if not low <= high:
            yield f"filter.{key} = [{low:g}, {high:g}] drops every group; write the lower bound first"
    if s.filter.non_default("advantage_range") and (not s.estimator.within_group or s.estimator.per_token):
        yield (
            "filter.advantage_range looks at one group at a time, but estimator.name = "
            f"{s.estimator.name!r} compares over the batch or by token; leave the first out, or use an estimator that "
            "compares completions within the group"
        )


def check_estimator(s: Settings) -> Iterator[str]:
    """`[estimator]`: group size and baselines fit."""
    name = s.estimator.name
    if isinstance(s.estimator, Passk) and s.estimator.k > s.rollout.group_size:
        yield (
            f"estimator.k ({s.estimator.k}) is more than rollout.group_size ({s.rollout.group_size}), so pass@k cannot "
            "be computed; lower the first or raise the second"
        )
    if name == "remax" and s.algorithm.non_default("reward_normalization"):
        yield (
            "algorithm.reward_normalization would give rewards another unit than the greedy reward that estimator.name "
            "= 'remax' subtracts; leave the first out, or use another estimator"
        )
    if s.algorithm.single_sample_policy == "raw" and (not s.estimator.within_group or s.estimator.reads != "rewards"):
        yield (
            "algorithm.single_sample_policy = 'raw' uses the raw reward of a single completion, but estimator.name = "
            f"{name!r} does not compare rewards within a group; set the first to 'zero' or 'drop'"
        )
    if isinstance(s.estimator, OptimalTokenBaseline | TirOptimalTokenBaseline) and (
        "baseline_only" in s.algorithm.truncation.values()
    ):
        yield (
            f"algorithm.truncation = 'baseline_only' has no effect with estimator.name = {name!r}, whose baseline is "
            "made of the log-probs of trained tokens; use exclude or keep, or another estimator"
        )


def check_estimator_inputs(s: Settings) -> Iterator[str]:
    """`[estimator]`: changes of the reward reach an estimator that reads rewards."""
    reads = s.estimator.reads
    if reads == "rewards":
        return
    without_effect = [f"algorithm.{key}" for key in s.algorithm.non_default(*_REWARD_CHANGES)]
    if "penalty" in s.algorithm.truncation.values():
        without_effect.append("algorithm.truncation = 'penalty'")
    if "zero_reward_in_baseline" in s.algorithm.truncation.values() and reads == "parts":
        without_effect.append("algorithm.truncation = 'zero_reward_in_baseline'")
    inputs = {"parts": "the parts of the reward", "correct": "correct and wrong (algorithm.success_threshold)"}[reads]
    for key in without_effect:
        yield (
            f"{key} has no effect with estimator.name = {s.estimator.name!r}, which compares {inputs}; leave the first "
            "out, or use another estimator"
        )


def check_overlong(s: Settings) -> Iterator[str]:
    """`algorithm.overlong_penalty`: it is on where something uses it, and its tokens fit."""
    tokens, _ = s.algorithm.overlong_penalty
    if "penalty" in s.algorithm.truncation.values() and not tokens:
        yield (
            "algorithm.truncation = 'penalty' uses the penalty for length, but algorithm.overlong_penalty is off; set "
            "the second to [tokens, penalty], or use exclude, keep, zero_reward, zero_reward_in_baseline or "
            "baseline_only"
        )
    if tokens > s.rollout.max_tokens:
        yield (
            f"algorithm.overlong_penalty covers {tokens} tokens, more than rollout.max_tokens "
            f"({s.rollout.max_tokens}); lower the first or raise the second"
        )
    if s.algorithm.non_default("overlong_penalty") and not tokens:
        yield "algorithm.overlong_penalty has a penalty over 0 tokens, which has no effect; write [tokens, penalty]"


def check_zero_reward(s: Settings) -> Iterator[str]:
    """`algorithm.truncation = "zero_reward"`: the advantage of the reward 0 is known, and no statistic reads it."""
    if "zero_reward" not in s.algorithm.truncation.values():
        return
    correction, problems = s.correction.resolved(), []
    if not s.estimator.affine:
        problems.append(f"estimator.name = {s.estimator.name!r} does not tell what the reward 0 is worth beside others")
    if correction.weights.endswith("-normalized"):
        problems.append(f"correction.weights = {correction.weights!r} divides by a mean over all trained tokens")
    if "m2po" in correction.reject:
        problems.append("correction.reject = 'm2po' chooses among all trained tokens")
    if s.loss.name in _CHOOSES_OVER_BATCH:
        problems.append(f"loss.name = {s.loss.name!r} chooses among all trained tokens")
    for problem in problems:
        yield (
            "algorithm.truncation = 'zero_reward' trains completions that count in no statistic of others, but "
            f"{problem}; use zero_reward_in_baseline, keep or exclude, or change the second"
        )
