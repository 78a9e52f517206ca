"""Rejection: which tokens, or whole completions, are too far from the policy that is trained.

A rule holds a divergence of the trainer's policy (pi) from the one that sampled (mu) against bounds, for each token or
for a completion's sum, mean or largest token. With d = log pi - log mu of a token, clamped to ±20::

    k1 = -d            signed: log mu/pi; its bounds are ratios mu/pi, compared as log(lower) <= k1 <= log(upper)
    k2 = d^2 / 2       never negative: an upper bound alone
    k3 = e^d - 1 - d   the same

`seq_mean_k1` bounds the geometric mean of the ratios. `m2po` looks at the whole batch. Several rules are all to be
passed; each sees the same mask, so their order does not matter. Estimators: Schulman 2020, Approximating KL divergence;
rules: verl, rollout_corr_helper.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from workers.train.algorithms.importance import log_ratios
from workers.train.algorithms.ratios import clamp_log_ratio
from workers.train.algorithms.registry import Registry
from workers.train.algorithms.sequences import Sequences
from workers.train.algorithms.token_selection import m2po

Statistic = Callable[[Tensor, Sequences], Tensor]


@dataclass(frozen=True, slots=True)
class RejectionTraits:
    """What a rule declares of itself."""

    level: str
    """What it keeps or rejects at once: `token` or `sequence` (a completion); `batch` chooses among all tokens."""
    statistic: Statistic
    """What is held against the bounds: (R, T), or (R, 1) where one number judges a completion."""
    two_sided: bool
    """Bounds are ratios, and are compared in logs; else there is an upper bound alone."""


@dataclass(frozen=True, slots=True)
class RejectionRule:
    """A rule and its bounds."""

    name: str
    """In `REJECTIONS`."""
    lower: float
    """The least ratio mu/pi for k1, 0 for none; not used by the others."""
    upper: float
    """The largest ratio mu/pi for k1, else the largest divergence."""

    def bounds(self) -> tuple[float, float]:
        """The bounds in units of the rule's statistic."""
        if REJECTIONS[self.name].traits.two_sided:
            return _log(self.lower), _log(self.upper)
        return float("-inf"), self.upper


@dataclass(frozen=True, slots=True, eq=False)
class Rejection:
    """What the rules left."""

    kept_RT: Tensor
    """bool, tokens of the mask that passed every rule."""
    kept_by_rule_RT: tuple[Tensor, ...]
    """bool (R, T) for each rule: tokens of the mask that passed this one."""
    rules: tuple[RejectionRule, ...]
    mask_RT: Tensor
    """bool, what the rules were given."""


REJECTIONS: Registry[RejectionTraits] = Registry(
    "rejection rule",
    {
        "log_ratio_RT": "float64, log pi - log mu of each token, clamped to ±20; 0 outside of the mask",
        "sequences": "Sequences over the mask before any rejection",
    },
)
"""By name, as `[[correction.reject]] rule` says it. Each returns bool (R, T): tokens of the mask that it keeps."""


def reject(
    rules: Sequence[RejectionRule],
    old_logprobs_RT: Tensor,
    rollout_logprobs_RT: Tensor,
    mask_RT: Tensor,
    completion_ids_R: Tensor,
) -> Rejection:
    """Apply every rule to the same tokens.

    Args:
        rules: all of them must be passed; none rejects nothing.
        old_logprobs_RT: log-probs of the sampled tokens under the trainer's policy.
        rollout_logprobs_RT: the same, under the policy that sampled. A token whose log-ratio is NaN passes no rule.
        mask_RT: bool, tokens in question (too old ones are out already). What stands elsewhere may be anything.
        completion_ids_R: integers, the completion that each row belongs to; all of its rows are here.

    Raises:
        KeyError: there is no such rule.
        ValueError: a rule is there twice.
    """
    names = [rule.name for rule in rules]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"rejection rule {twice[0]!r} is there twice; keep one of them")
    inputs = {
        "log_ratio_RT": clamp_log_ratio(log_ratios(old_logprobs_RT, rollout_logprobs_RT, mask_RT)),
        "sequences": Sequences(mask_RT, completion_ids_R),
    }
    by_rule = tuple(REJECTIONS[rule.name](inputs, {"lower": rule.lower, "upper": rule.upper}) for rule in rules)
    kept_RT = mask_RT
    for passed_RT in by_rule:
        kept_RT = kept_RT & passed_RT
    return Rejection(kept_RT=kept_RT, kept_by_rule_RT=by_rule, rules=tuple(rules), mask_RT=mask_RT)


def k1(log_ratio: Tensor) -> Tensor:
    """-d."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """d^2 / 2."""
    return log_ratio.square() / 2


def k3(log_ratio: Tensor) -> Tensor:
    """e^d - 1 - d."""
    return log_ratio.expm1() - log_ratio


def _token(values_RT: Tensor, _: Sequences) -> Tensor:
    return values_RT


def _sum(values_RT: Tensor, sequences: Sequences) -> Tensor:
    return sequences.broadcast(sequences.sum(values_RT))


def _mean(values_RT: Tensor, sequences: Sequences) -> Tensor:
    return sequences.broadcast(sequences.mean(values_RT))


def _max(values_RT: Tensor, sequences: Sequences) -> Tensor:
    return sequences.broadcast(sequences.max(values_RT))


_DIVERGENCES: Final = {"k1": k1, "k2": k2, "k3": k3}
_LEVELS: Final = {
    "token": (_token, "{k}_t"),
    "seq_sum": (_sum, "sum_t {k}_t"),
    "seq_mean": (_mean, "mean_t {k}_t"),
    "seq_max": (_max, "max_t {k}_t"),
}


def _register(level: str, divergence: str) -> None:
    over, formula = _LEVELS[level]
    each = _DIVERGENCES[divergence]
    two_sided = divergence == "k1"

    def statistic(log_ratio_RT: Tensor, sequences: Sequences) -> Tensor:
        return over(each(log_ratio_RT), sequences)

    def between(log_ratio_RT: Tensor, sequences: Sequences, *, lower: float, upper: float) -> Tensor:
        found = statistic(log_ratio_RT, sequences)
        return sequences.mask_RT & (found >= _log(lower)) & (found <= _log(upper))

    def below(log_ratio_RT: Tensor, sequences: Sequences, *, upper: float) -> Tensor:
        return sequences.mask_RT & (statistic(log_ratio_RT, sequences) <= upper)

    bounds = "log(lower) <= {} <= log(upper)" if two_sided else "{} <= upper"
    traits = RejectionTraits("token" if level == "token" else "sequence", statistic, two_sided)
    REJECTIONS.register(
        f"{level}_{divergence}",
        traits,
        formula="keep where " + bounds.format(formula.format(k=divergence)),
        source="verl rollout_corr_helper.py",
    )(between if two_sided else below)


# k1 has a sign, so its largest token says nothing.
for _level in _LEVELS:
    for _divergence in _DIVERGENCES:
        if (_level, _divergence) != ("seq_max", "k1"):
            _register(_level, _divergence)


@REJECTIONS.register(
    "m2po",
    RejectionTraits("batch", lambda log_ratio_RT, _: log_ratio_RT.square(), two_sided=False),
    formula="keep the tokens of smallest d^2, as many as have mean d^2 < upper",
    source="Zheng et al. 2025, arXiv:2510.01161; AReaL actor.py",
)
def second_moment(log_ratio_RT: Tensor, sequences: Sequences, *, upper: float) -> Tensor:
    """Reject the tokens of largest d^2 in the batch until the mean of the rest is below the bound; see `m2po`."""
    return m2po(torch.zeros_like(log_ratio_RT), log_ratio_RT, sequences.mask_RT, threshold=upper)


def _log(ratio: float) -> float:
    return math.log(ratio) if ratio > 0 else float("-inf")
