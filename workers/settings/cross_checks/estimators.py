"""Which groups are trained, and how their rewards become advantages."""

import math
from collections.abc import Iterator

from workers.settings.algorithm import Normalization
from workers.settings.estimators import Gae, OptimalTokenBaseline, Passk, TirOptimalTokenBaseline
from workers.settings.settings import Settings


def check_filters(s: Settings) -> Iterator[str]:
    """`[filter]`: bounds that leave something, and that the estimator allows."""
    if s.min_valid_rows > s.rollout.group_size:
        yield (
            f"filter.min_valid_rows ({s.min_valid_rows}; at least 2 unless set) is more than rollout.group_size "
            f"({s.rollout.group_size}), so every group would be dropped; lower the first or raise the second"
        )
    if s.filter.min_mean_reward > s.filter.max_mean_reward:
        yield (
            f"filter.min_mean_reward ({s.filter.min_mean_reward:g}) is more than filter.max_mean_reward "
            f"({s.filter.max_mean_reward:g}), so every group would be dropped; lower the first or raise the second"
        )
    if s.filter.min_advantage > s.filter.max_advantage:
        yield (
            f"filter.min_advantage ({s.filter.min_advantage:g}) is more than filter.max_advantage "
            f"({s.filter.max_advantage:g}), so every group would be dropped; lower the first or raise the second"
        )
    for key, value, off in (
        ("min_advantage", s.filter.min_advantage, 0.0),
        ("max_advantage", s.filter.max_advantage, math.inf),
    ):
        if value != off and (not s.estimator.within_group or s.estimator.per_token):
            yield (
                f"filter.{key} looks at one group at a time, before its tokens are, but estimator.name = "
                f"{s.estimator.name!r} compares over the batch or by token; leave the first out, or use an estimator "
                "that compares completions within the group"
            )


def check_estimator(s: Settings) -> Iterator[str]:
    """`[estimator]`: what it needs, and what it has no use for."""
    name = s.estimator.name
    if isinstance(s.estimator, Passk) and s.estimator.k > s.rollout.group_size:
        yield (
            f"estimator.k ({s.estimator.k}) is more than rollout.group_size ({s.rollout.group_size}), so pass@k is "
            "never known; lower the first or raise the second"
        )
    if s.estimator.reads != "rewards":
        for key in s.shaping.non_default("bias", "scale", "clip", "overlong_tokens"):
            yield _no_effect(f"shaping.{key}", name, s.estimator.reads)
        if s.reward_normalization.non_default():
            yield _no_effect("reward_normalization", name, s.estimator.reads)
        if "penalty" in s.algorithm.truncation.values():
            yield _no_effect("algorithm.truncation = 'penalty'", name, s.estimator.reads)
        if "zero_reward" in s.algorithm.truncation.values() and s.estimator.reads == "parts":
            yield _no_effect("algorithm.truncation = 'zero_reward'", name, s.estimator.reads)
    if name == "remax" and s.reward_normalization.non_default():
        yield (
            "reward_normalization would put rewards into other units than the greedy rollout's that estimator.name = "
            "'remax' subtracts; leave the first out, or use another estimator"
        )
    if s.algorithm.singleton == "raw" and (not s.estimator.within_group or s.estimator.reads != "rewards"):
        yield (
            f"algorithm.singleton = 'raw' gives a completion alone in its group its own reward, but estimator.name = "
            f"{name!r} does not compare rewards within a group; set the first to 'zero' or 'drop'"
        )
    if isinstance(s.estimator, OptimalTokenBaseline | TirOptimalTokenBaseline) and (
        "baseline_only" in s.algorithm.truncation.values()
    ):
        yield (
            f"algorithm.truncation = 'baseline_only' has no effect with estimator.name = {name!r}, whose baseline is "
            "made of the log-probs of tokens that bear loss; use exclude or keep, or another estimator"
        )
    if s.critic.non_default() and not isinstance(s.estimator, Gae):
        yield (
            f"[critic] is set, but estimator.name = {name!r} has no use for values; leave [critic] out, or set "
            "estimator.name to 'gae'"
        )


def _no_effect(key: str, estimator: str, reads: str) -> str:
    told = {"parts": "the parts of the reward", "correct": "right and wrong (algorithm.correct_at)"}[reads]
    return (
        f"{key} has no effect with estimator.name = {estimator!r}, which compares {told}; leave the first out, or use "
        "another estimator"
    )


def check_shaping(s: Settings) -> Iterator[str]:
    """`[shaping]` and both normalizations."""
    if "penalty" in s.algorithm.truncation.values() and not s.shaping.overlong_tokens:
        yield (
            "algorithm.truncation = 'penalty' asks for the penalty for length, but shaping.overlong_tokens is 0, so "
            "there is none; set the second, or use exclude, keep, zero_reward or baseline_only"
        )
    if s.shaping.overlong_tokens > s.rollout.max_tokens:
        yield (
            f"shaping.overlong_tokens ({s.shaping.overlong_tokens}) is more than rollout.max_tokens "
            f"({s.rollout.max_tokens}); lower the first or raise the second"
        )
    if s.shaping.non_default("overlong_penalty") and not s.shaping.overlong_tokens:
        yield (
            "shaping.overlong_penalty is set, but shaping.overlong_tokens is 0, so nothing is too long; set the second "
            "or leave the first out"
        )
    for key in ("reward_normalization", "advantage_normalization"):
        chosen: Normalization = getattr(s, key)
        if chosen.leave_one_out and chosen.mean == "none":
            yield f"{key}.leave_one_out needs a mean, but {key}.mean is 'none'; set the second to 'group' or 'batch'"
