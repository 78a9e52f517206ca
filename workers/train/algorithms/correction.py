"""Importance weights: how much likelier a sampled token, or completion, is under the trainer's policy.

The engine samples a completion (mu, `rollout_logprobs`); the trainer computes its own log-probs of it (pi,
`old_logprobs`). They differ: other kernels, another precision, an older policy. The weight pi/mu corrects for that,
within bounds.

The three steps of a correction, each over the whole optimizer batch, as normalization and `m2po` need::

    rejection = reject(rules, log_ratios(old_logprobs_RT, rollout_logprobs_RT, Sequences(mask_RT, completion_ids_R)))
    kept      = log_ratios(old_logprobs_RT, rollout_logprobs_RT, Sequences(rejection.kept_RT, completion_ids_R))
    weights   = importance_weights(kept, level=..., ...)

Weights come after rejection, so rejected tokens enter no mean that survivors are divided by.

Rejection: masks tokens, or whole completions, whose sampling policy is too far from the policy in training.

A rule compares a divergence of the trainer's policy (pi) from the sampling policy (mu) with bounds, per token or per
completion (sum, mean or maximum over its tokens). With d = log pi - log mu of a token, clamped to ±20::

    k1 = -d            signed: log mu/pi; bounds are ratios mu/pi, compared as log(lower) <= k1 <= log(upper)
    k2 = d^2 / 2       never negative: an upper bound only
    k3 = e^d - 1 - d   never negative: an upper bound only

`seq_mean_k1` bounds the geometric mean of the ratios. `m2po` looks at the whole batch. A token must pass every rule;
each rule sees the same mask, so their order does not matter. Estimators: Schulman 2020, Approximating KL divergence;
rules: verl, rollout_corr_helper.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from workers.train.algorithms.registry import Registry
from workers.train.algorithms.sequences import LogRatios, Sequences, clamp_log_ratio
from workers.train.algorithms.token_selection import m2po


@dataclass(frozen=True, slots=True)
class ImportanceTraits:
    """Declared properties of an importance level."""

    unit: str
    """What a mean of its weights is taken over: `token` or `completion`."""


@dataclass(frozen=True, slots=True, eq=False)
class ImportanceWeights:
    """Importance weights without gradient and what they were made from; every tensor is 0 outside the mask."""

    weights_RT: Tensor
    """float64, factor of each token's loss."""
    normalizer: Tensor
    """float64 scalar, mean weight that the bounded weights were divided by; 1 without normalization."""
    raw_RT: Tensor
    """float64, before the bounds."""
    bounded_RT: Tensor
    """float64, within the bounds, before division by `normalizer`."""
    log_ratios: LogRatios
    """What the weights were computed from."""
    level: str
    lower: float
    upper: float
    out_of_range: str
    normalize: bool


IMPORTANCE_LEVELS: Registry[ImportanceTraits] = Registry(
    "importance level",
    {
        "log_ratio_RT": "float64, log pi - log mu of each token; 0 outside the mask",
        "sequences": "Sequences over the mask",
    },
)
"""Importance levels by the name in `[correction] weights`. Each returns float64 (R, T): pi/mu, bounded by exp(±20)."""


@IMPORTANCE_LEVELS.register(
    "token",
    ImportanceTraits(unit="token"),
    formula="pi_t / mu_t",
    source="Yao et al. 2025, Your efficient RL framework secretly brings you off-policy RL training",
)
def token_ratios(log_ratio_RT: Tensor) -> Tensor:
    """Return the ratio of each token alone: biased, low variance."""
    return clamp_log_ratio(log_ratio_RT).exp()


@IMPORTANCE_LEVELS.register(
    "sequence",
    ImportanceTraits(unit="completion"),
    formula="prod_t pi_t / mu_t",
    source="Liu et al. 2025, When speed kills stability; verl rollout_corr_helper.py",
)
def sequence_ratios(log_ratio_RT: Tensor, sequences: Sequences) -> Tensor:
    """Return the ratio of the whole completion on each of its tokens: unbiased before the bounds, high variance."""
    return clamp_log_ratio(sequences.broadcast(sequences.sum(log_ratio_RT))).exp().expand_as(log_ratio_RT)


def importance_weights(
    log_ratios: LogRatios, *, level: str, lower: float, upper: float, out_of_range: str, normalize: bool
) -> ImportanceWeights:
    """Compute the importance weight of each token.

    Args:
        log_ratios: over the tokens that bear loss, after rejection.
        level: name in `IMPORTANCE_LEVELS`.
        lower: smallest weight; 0 for no bound.
        upper: largest weight; infinity for no bound.
        out_of_range: treatment of a weight outside the bounds. `truncate` clamps it (TIS, Yao et al. 2025), `zero`
            removes it (IcePop, Ling Team 2025).
        normalize: divide by the mean over the tokens or completions of the mask (the level's unit), zero weights
            included. A mean of 0 is left alone.

    Returns:
        The weights. An empty mask gives zeros and a normalizer of 1.

    Raises:
        KeyError: unknown level.
        ValueError: unknown `out_of_range`.
    """
    mask_RT, sequences = log_ratios.mask_RT, log_ratios.sequences
    ratios_RT = IMPORTANCE_LEVELS[level]({"log_ratio_RT": log_ratios.values_RT, "sequences": sequences}, {})
    raw_RT = torch.where(mask_RT, ratios_RT, 0.0)
    bounded_RT = torch.where(mask_RT, _apply_bounds(raw_RT, lower, upper, out_of_range), 0.0)
    normalizer = raw_RT.new_ones(())
    if normalize:
        mean = _mean(bounded_RT, sequences, IMPORTANCE_LEVELS[level].traits.unit)
        normalizer = torch.where(mean > 0, mean, 1.0)
    return ImportanceWeights(
        weights_RT=bounded_RT / normalizer,
        normalizer=normalizer,
        raw_RT=raw_RT,
        bounded_RT=bounded_RT,
        log_ratios=log_ratios,
        level=level,
        lower=lower,
        upper=upper,
        out_of_range=out_of_range,
        normalize=normalize,
    )


def _apply_bounds(raw_RT: Tensor, lower: float, upper: float, out_of_range: str) -> Tensor:
    if out_of_range == "truncate":
        return raw_RT.clamp(lower, upper)
    if out_of_range == "zero":
        return torch.where((raw_RT >= lower) & (raw_RT <= upper), raw_RT, 0.0)
    raise ValueError(f"unknown treatment {out_of_range!r} of weights outside the bounds; use 'truncate' or 'zero'")


def _mean(weights_RT: Tensor, sequences: Sequences, unit: str) -> Tensor:
    """Return the mean over masked tokens, or over completions with one; 0 where there is none."""
    if unit == "token":
        return sequences.sum(weights_RT).sum() / sequences.lengths_S.sum().clamp(min=1)
    return sequences.mean(weights_RT).sum() / (sequences.lengths_S > 0).sum().clamp(min=1)


Statistic = Callable[[Tensor, Sequences], Tensor]


@dataclass(frozen=True, slots=True)
class RejectionTraits:
    """Declared properties of a rejection rule."""

    level: str
    """Unit that the rule keeps or rejects: `token`, `sequence` (a completion), or `batch` (all tokens together)."""
    statistic: Statistic
    """Value compared with the bounds: (R, T), or (R, 1) for one number per completion."""
    two_sided: bool
    """True if the bounds are ratios compared in logs; False for an upper bound only."""


@dataclass(frozen=True, slots=True)
class RejectionRule:
    """A rule and its bounds."""

    name: str
    """Name in `REJECTIONS`."""
    lower: float
    """Smallest ratio mu/pi for k1, 0 for none; other divergences ignore it."""
    upper: float
    """Largest ratio mu/pi for k1, otherwise the largest divergence."""

    def bounds(self) -> tuple[float, float]:
        """Return the bounds in units of the rule's statistic."""
        if REJECTIONS[self.name].traits.two_sided:
            return _log(self.lower), _log(self.upper)
        return float("-inf"), self.upper


@dataclass(frozen=True, slots=True, eq=False)
class Rejection:
    """Tokens that passed the rules."""

    kept_RT: Tensor
    """bool, tokens of the mask that passed every rule."""
    kept_by_rule_RT: tuple[Tensor, ...]
    """bool (R, T) per rule: tokens of the mask that passed it."""
    rules: tuple[RejectionRule, ...]
    log_ratios: LogRatios
    """What the rules compared, over the mask before rejection."""

    def rejected_by_rule(self) -> dict[str, Tensor]:
        """Return bool (R, T) by rule name: tokens of the mask that the rule rejected."""
        mask_RT = self.log_ratios.mask_RT
        return {rule.name: mask_RT & ~kept_RT for rule, kept_RT in zip(self.rules, self.kept_by_rule_RT, strict=True)}


REJECTIONS: Registry[RejectionTraits] = Registry(
    "rejection rule",
    {
        "log_ratio_RT": "float64, log pi - log mu of each token, clamped to ±20; 0 outside the mask",
        "sequences": "Sequences over the mask before rejection",
    },
)
"""Rules by the name in `[[correction.reject]] rule`. Each returns bool (R, T): tokens of the mask that it keeps."""


def reject(rules: Sequence[RejectionRule], log_ratios: LogRatios) -> Rejection:
    """Apply every rule to the same tokens.

    Args:
        rules: a token must pass all of them; no rule rejects nothing.
        log_ratios: over the tokens in question (too old ones are already masked). A token whose log-ratio is NaN passes
            no rule.

    Raises:
        KeyError: unknown rule.
        ValueError: a rule occurs twice.
    """
    names = [rule.name for rule in rules]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"rejection rule {twice[0]!r} is there twice; keep one of them")
    inputs = {"log_ratio_RT": clamp_log_ratio(log_ratios.values_RT), "sequences": log_ratios.sequences}
    kept_by_rule_RT = tuple(REJECTIONS[rule.name](inputs, {"lower": rule.lower, "upper": rule.upper}) for rule in rules)
    kept_RT = log_ratios.mask_RT
    for passed_RT in kept_by_rule_RT:
        kept_RT = kept_RT & passed_RT
    return Rejection(kept_RT, kept_by_rule_RT, tuple(rules), log_ratios)


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


def _sequence_mean(values_RT: Tensor, sequences: Sequences) -> Tensor:
    return sequences.broadcast(sequences.mean(values_RT))


def _max(values_RT: Tensor, sequences: Sequences) -> Tensor:
    return sequences.broadcast(sequences.max(values_RT))


_DIVERGENCES: Final = {"k1": k1, "k2": k2, "k3": k3}
_LEVELS: Final = {
    "token": (_token, "{k}_t"),
    "seq_sum": (_sum, "sum_t {k}_t"),
    "seq_mean": (_sequence_mean, "mean_t {k}_t"),
    "seq_max": (_max, "max_t {k}_t"),
}


def _register(level: str, divergence: str) -> None:
    reduce, formula = _LEVELS[level]
    per_token = _DIVERGENCES[divergence]
    two_sided = divergence == "k1"

    def statistic(log_ratio_RT: Tensor, sequences: Sequences) -> Tensor:
        return reduce(per_token(log_ratio_RT), sequences)

    def between(log_ratio_RT: Tensor, sequences: Sequences, *, lower: float, upper: float) -> Tensor:
        value = statistic(log_ratio_RT, sequences)
        return sequences.mask_RT & (value >= _log(lower)) & (value <= _log(upper))

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


# k1 is signed, so its maximum over tokens is meaningless.
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
