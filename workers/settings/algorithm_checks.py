"""Checks of `[filter]`, `[estimator]`, `[loss]`, `[correction]` and what `[algorithm]` does to rewards."""

from collections.abc import Iterator

from workers.settings.algorithm import PRESETS
from workers.settings.estimator_options import OptimalTokenBaseline, Passk, TirOptimalTokenBaseline
from workers.settings.loss_options import Clipped
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


def check_loss(s: Settings) -> Iterator[str]:
    """`[loss]`: aggregation, updates and bounds fit the loss."""
    name, chosen = s.loss.name, s.algorithm.aggregation
    if chosen not in {"auto", s.loss.aggregation} and s.loss.aggregation:
        yield (
            f"loss.name = {name!r} is defined with algorithm.aggregation = {s.loss.aggregation!r}, not {chosen!r}; set "
            "the second to 'auto', or use another loss"
        )
    if s.loss.on_policy and s.train.updates_per_batch > 1:
        yield (
            f"loss.name = {name!r} has no ratio, so it is wrong from the second pass over a batch on, but "
            f"train.updates_per_batch is {s.train.updates_per_batch}; set the second to 1, or use a loss with a ratio"
        )
    if isinstance(s.loss, Clipped) and 0 < s.loss.dual_clip <= 1:
        yield (
            f"loss.dual_clip ({s.loss.dual_clip:g}) must be above 1 (3 is common), or 0 for none: at 1 or less it "
            "would cut what loss.clip_high allows"
        )


def check_preset(s: Settings) -> Iterator[str]:
    """`correction.preset`: it exists, and the rest of the settings fits it."""
    name = s.correction.preset
    if not name:
        return
    if name not in PRESETS:
        yield f"correction.preset: unknown preset {name!r}; use one of {', '.join(PRESETS)}"
        return
    for key in s.correction.non_default():
        if key != "preset":
            yield f"correction.{key} is set, and correction.preset = {name!r} sets it too; leave one of them out"
    preset = PRESETS[name]
    if preset.bypass != (s.algorithm.proximal == "engine"):
        proximal = "'engine'" if preset.bypass else "'recompute' or 'interpolate'"
        yield (
            f"correction.preset = {name!r} needs algorithm.proximal = {proximal}, not {s.algorithm.proximal!r}; change "
            "the second, or use another preset"
        )
    if (preset.loss == "reinforce") != s.loss.on_policy:
        loss = "'reinforce'" if preset.loss == "reinforce" else "a loss with a ratio, such as 'clipped'"
        yield (
            f"correction.preset = {name!r} needs loss.name = {loss}, not {s.loss.name!r}; change the second, or use "
            "another preset"
        )


def check_correction(s: Settings) -> Iterator[str]:
    """`[correction]`: weights correct once, and their range is not empty."""
    correction = s.correction.resolved() if s.correction.preset in PRESETS else s.correction
    if s.algorithm.proximal == "engine" and correction.weights != "none" and not s.loss.on_policy:
        yield (
            f"correction.weights = {correction.weights!r} and algorithm.proximal = 'engine' would correct twice: the "
            f"ratio of loss.name = {s.loss.name!r} already uses the engine's log-probs; set the first to 'none', or "
            "the second to 'recompute'"
        )
    low, high = correction.weight_range
    if low >= high:
        yield f"correction.weight_range = [{low:g}, {high:g}] is empty; write the lower bound first"


def check_rejection(s: Settings) -> Iterator[str]:
    """`correction.reject`: every rule has the bounds that it uses."""
    for rule, (low, high) in s.correction.reject.items():
        if low and not rule.endswith("_k1"):
            yield f"correction.reject.{rule} has no lower bound; write {rule} = [0.0, {high:g}]"
        elif low >= high:
            yield f"correction.reject.{rule} = [{low:g}, {high:g}] is empty; write the lower bound first"
