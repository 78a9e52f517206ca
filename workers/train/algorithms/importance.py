"""Importance weights: how much likelier a sampled token, or completion, is under the trainer's policy.

The engine samples a completion (mu, `rollout_logprobs`); the trainer computes its own log-probs of it (pi,
`old_logprobs`). They differ: other kernels, another precision, an older policy. The weight pi/mu corrects for that,
within bounds.

The three steps of a correction, each over the whole optimizer batch, as normalization and `m2po` need::

    rejection = reject(rules, log_ratios(old_logprobs_RT, rollout_logprobs_RT, Sequences(mask_RT, completion_ids_R)))
    kept      = log_ratios(old_logprobs_RT, rollout_logprobs_RT, Sequences(rejection.kept_RT, completion_ids_R))
    weights   = importance_weights(kept, level=..., ...)

Weights come after rejection, so rejected tokens enter no mean that survivors are divided by.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.train.algorithms.ratios import LogRatios, clamp_log_ratio
from workers.train.algorithms.registry import Registry
from workers.train.algorithms.sequences import Sequences


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
