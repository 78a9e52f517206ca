"""Log-probs and importance weights that compare three policies over the loss tokens of an optimizer batch.

The rollout policy sampled the tokens (the engine's log-probs). The old policy is the trainer's when the batch was
prepared; the current one is in training. Ratios are taken against proximal log-probs: those of the old policy, of the
rollout policy, or in between. Importance weights lead from the rollout policy to the old or interpolated one.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from workers.settings import Settings
from workers.train.algorithms.importance import ImportanceWeights, importance_weights
from workers.train.algorithms.proximal import interpolate_logprobs
from workers.train.algorithms.ratios import LogRatios, log_ratios
from workers.train.algorithms.sequences import Sequences
from workers.train.step.batch import Batch


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PolicyComparison:
    """Old and proximal log-probs and importance weights of a batch.

    Either a `CompleteComparison`, or zeros at first: then the first pass over each micro-batch, whose weights are still
    the old ones, records its rows.
    """

    old_logprobs_RT: Tensor
    """Includes tokens that a rejection rule took out, because its metrics need them."""
    proximal_RT: Tensor
    """Log-probs that ratios are taken against."""
    weights_RT: Tensor
    """Importance weights; 1 without any."""

    @classmethod
    def pending(cls, batch: Batch) -> Self:
        """Return a comparison whose rows are all still to be recorded."""
        zeros_RT = torch.zeros_like(batch.rollout_logprobs_RT)
        return cls(old_logprobs_RT=zeros_RT, proximal_RT=zeros_RT.clone(), weights_RT=zeros_RT.clone())

    def record(self, rows: Tensor, part: "PolicyComparison") -> None:
        """Store the comparison of some rows, computed from their first pass."""
        width = part.old_logprobs_RT.shape[1]
        self.old_logprobs_RT[rows, :width] = part.old_logprobs_RT
        self.proximal_RT[rows, :width] = part.proximal_RT
        self.weights_RT[rows, :width] = part.weights_RT


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CompleteComparison(PolicyComparison):
    """A comparison with everything that its metrics need."""

    log_ratios: LogRatios
    """Old against rollout policy."""
    importance: ImportanceWeights | None
    """The weights with what they were made from; None without weights."""


def compare_policies(
    batch: Batch,
    sequences: Sequences,
    old_logprobs_RT: Tensor,
    version: int,
    settings: Settings,
    rows: Tensor | None = None,
) -> CompleteComparison:
    """Compute proximal log-probs and importance weights.

    Args:
        batch: the whole optimizer batch.
        sequences: completions over the loss tokens of these rows.
        old_logprobs_RT: log-probs of these rows under the trainer's policy when the batch was prepared.
        version: the policy version in training.
        settings: of the run.
        rows: row numbers; all by default. Weights that are normalized over the batch need all rows.
    """
    mask_RT = sequences.mask_RT
    index = (slice(None) if rows is None else rows, slice(mask_RT.shape[1]))
    old_logprobs_RT = old_logprobs_RT.detach()
    rollout_RT = torch.where(mask_RT, batch.rollout_logprobs_RT[index], 0.0).to(old_logprobs_RT.dtype)
    masked_old_RT = torch.where(mask_RT, old_logprobs_RT, 0.0)
    old_to_rollout = compared = log_ratios(masked_old_RT, rollout_RT, sequences)
    proximal_RT = rollout_RT if settings.algorithm.proximal == "engine" else masked_old_RT
    if settings.algorithm.proximal == "interpolate":
        proximal_RT = interpolate_logprobs(
            rollout_RT, masked_old_RT, batch.versions_RT[index], mask_RT, version, method="loglinear"
        )
        compared = log_ratios(proximal_RT, rollout_RT, sequences)
    importance = _importance_weights(compared, settings)
    return CompleteComparison(
        old_logprobs_RT=old_logprobs_RT,
        proximal_RT=proximal_RT,
        weights_RT=(
            torch.ones_like(old_logprobs_RT) if importance is None else importance.weights_RT.to(old_logprobs_RT.dtype)
        ),
        log_ratios=old_to_rollout,
        importance=importance,
    )


def _importance_weights(compared: LogRatios, settings: Settings) -> ImportanceWeights | None:
    correction = settings.correction.resolved()
    if correction.level == "none":
        return None
    lower, upper = correction.weight_range
    return importance_weights(
        compared,
        level=correction.level,
        lower=lower,
        upper=upper,
        out_of_range=correction.out_of_range,
        normalize=correction.normalize,
    )
