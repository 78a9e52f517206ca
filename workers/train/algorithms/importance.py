"""Importance weights: how much likelier a sampled token, or completion, is under the trainer's policy.

A completion was sampled by the engine (mu, "rollout") and is trained under log-probs of the trainer (pi, "train"),
which differ: other kernels, another precision, an older policy. The weight pi/mu makes up for it, within bounds.

The three steps of a correction, each given the whole optimizer batch (normalising and `m2po` look at all of it)::

    rejection = reject(rules, old_logprobs_RT, rollout_logprobs_RT, mask_RT, completion_ids_R)
    weights   = importance_weights(old_logprobs_RT, rollout_logprobs_RT, rejection.kept_RT, completion_ids_R,
    level=..., ...)
    metrics   = correction_metrics(old_logprobs_RT, rollout_logprobs_RT, rejection.kept_RT, completion_ids_R,
                                   rejection=rejection, weights=weights)

Weights come after rejection, so that what was rejected is in no mean that a survivor is divided by.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.train.algorithms.ratios import clamp_log_ratio
from workers.train.algorithms.registry import Registry
from workers.train.algorithms.sequences import Sequences


@dataclass(frozen=True, slots=True)
class ImportanceTraits:
    """What a level declares of itself."""

    unit: str
    """What a mean of its weights is taken over: `token` or `completion`."""


@dataclass(frozen=True, slots=True, eq=False)
class ImportanceWeights:
    """Weights without gradient, and what they were made from; everything is 0 outside of the mask."""

    weights_RT: Tensor
    """What a token's loss is multiplied by, in the dtype of the log-probs."""
    factor: Tensor
    """float64 scalar, what the bounded weights were divided by; 1 where nothing was."""
    raw_RT: Tensor
    """float64, before the bounds."""
    bounded_RT: Tensor
    """float64, within the bounds, not yet divided by the factor."""
    mask_RT: Tensor
    """bool, the tokens that have a weight."""
    level: str
    lower: float
    upper: float
    out_of_range: str
    normalize: bool


IMPORTANCE_LEVELS: Registry[ImportanceTraits] = Registry(
    "importance level",
    {
        "log_ratio_RT": "float64, log pi - log mu of each token; 0 outside of the mask",
        "sequences": "Sequences over the mask",
    },
)
"""By name, as `[correction] weights` says it. Each returns float64 (R, T): the ratio pi/mu, bounded by exp(±20)."""


def log_ratios(old_logprobs_RT: Tensor, rollout_logprobs_RT: Tensor, mask_RT: Tensor) -> Tensor:
    """Log pi - log mu of the tokens of the mask, float64, without gradient; 0 elsewhere, whatever stood there."""
    train, rollout = (
        torch.where(mask_RT, logprobs_RT.detach(), 0.0).double()
        for logprobs_RT in (old_logprobs_RT, rollout_logprobs_RT)
    )
    return train - rollout


@IMPORTANCE_LEVELS.register(
    "token",
    ImportanceTraits(unit="token"),
    formula="pi_t / mu_t",
    source="Yao et al. 2025, Your efficient RL framework secretly brings you off-policy RL training",
)
def token_ratios(log_ratio_RT: Tensor) -> Tensor:
    """Each token by itself: biased, little variance."""
    return clamp_log_ratio(log_ratio_RT).exp()


@IMPORTANCE_LEVELS.register(
    "sequence",
    ImportanceTraits(unit="completion"),
    formula="prod_t pi_t / mu_t",
    source="Liu et al. 2025, When speed kills stability; verl rollout_corr_helper.py",
)
def sequence_ratios(log_ratio_RT: Tensor, sequences: Sequences) -> Tensor:
    """The whole completion, over all of its rows, on each of its tokens: unbiased before the bounds, much variance."""
    return clamp_log_ratio(sequences.broadcast(sequences.sum(log_ratio_RT))).exp().expand_as(log_ratio_RT)


def importance_weights(
    old_logprobs_RT: Tensor,
    rollout_logprobs_RT: Tensor,
    mask_RT: Tensor,
    completion_ids_R: Tensor,
    *,
    level: str,
    lower: float,
    upper: float,
    out_of_range: str,
    normalize: bool,
) -> ImportanceWeights:
    """The weight of each token of the mask.

    Args:
        old_logprobs_RT: log-probs of the sampled tokens under the trainer's policy.
        rollout_logprobs_RT: the same, under the policy that sampled.
        mask_RT: bool, the tokens that bear loss, after rejection. What stands elsewhere may be anything.
        completion_ids_R: integers, the completion that each row belongs to; all of its rows are here.
        level: name in `IMPORTANCE`.
        lower: bound of a weight; 0 is none.
        upper: the same; infinity is none.
        out_of_range: what becomes of a weight out of bounds: `truncate` brings it to the bound (TIS, Yao et al. 2025),
            `zero` takes it away (IcePop, Ling Team 2025).
        normalize: divide by the mean over the tokens, or the completions, of the mask (the level's own unit), those
            with weight 0 included; a mean of 0 is not divided by.

    Returns:
        The weights. An empty mask gives zeros and a factor of 1.

    Raises:
        KeyError: there is no such level.
        ValueError: `outside` is neither.
    """
    sequences = Sequences(mask_RT, completion_ids_R)
    inputs = {"log_ratio_RT": log_ratios(old_logprobs_RT, rollout_logprobs_RT, mask_RT), "sequences": sequences}
    raw_RT = torch.where(mask_RT, IMPORTANCE_LEVELS[level](inputs, {}), 0.0)
    bounded_RT = torch.where(mask_RT, _apply_bounds(raw_RT, lower, upper, out_of_range), 0.0)
    factor = raw_RT.new_ones(())
    if normalize:
        mean = _mean(bounded_RT, sequences, IMPORTANCE_LEVELS[level].traits.unit)
        factor = torch.where(mean > 0, mean, 1.0)
    return ImportanceWeights(
        weights_RT=(bounded_RT / factor).to(old_logprobs_RT.dtype),
        factor=factor,
        raw_RT=raw_RT,
        bounded_RT=bounded_RT,
        mask_RT=mask_RT,
        level=level,
        lower=lower,
        upper=upper,
        out_of_range=out_of_range,
        normalize=normalize,
    )


def _apply_bounds(raw_RT: Tensor, lower: float, upper: float, outside: str) -> Tensor:
    if outside == "truncate":
        return raw_RT.clamp(lower, upper)
    if outside == "zero":
        return torch.where((raw_RT >= lower) & (raw_RT <= upper), raw_RT, 0.0)
    raise ValueError(f"unknown treatment {outside!r} of weights out of bounds; use 'truncate' or 'zero'")


def _mean(weights_RT: Tensor, sequences: Sequences, unit: str) -> Tensor:
    """Mean over the tokens of the mask, or over the completions that have one; 0 where there is none."""
    if unit == "token":
        return sequences.sum(weights_RT).sum() / sequences.lengths_S.sum().clamp(min=1)
    return sequences.mean(weights_RT).sum() / (sequences.lengths_S > 0).sum().clamp(min=1)
