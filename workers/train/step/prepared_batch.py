"""Everything about an optimizer batch that is decided before its first gradient.

Three policies are compared over its loss tokens. The rollout policy sampled them (the engine's log-probs). The old
policy is the trainer's when the batch was prepared; the current one is in training. Ratios are taken against proximal
log-probs: those of the old policy, of the rollout policy, or in between. Importance weights lead from the rollout
policy to the old or interpolated one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from stream.validity import DropReason
from workers.settings import Settings
from workers.train.algorithms.advantages import ESTIMATORS
from workers.train.algorithms.aggregation import BatchTotals, branch_weights, row_factors
from workers.train.algorithms.correction import ImportanceWeights, Rejection, RejectionRule, importance_weights, reject
from workers.train.algorithms.losses import LOSSES
from workers.train.algorithms.masks import Masks, reject_tokens
from workers.train.algorithms.proximal import interpolate_logprobs
from workers.train.algorithms.sequences import LogRatios, Sequences, log_ratios
from workers.train.algorithms.token_selection import select_tokens
from workers.train.step.batch import Batch, ForwardStatistics
from workers.train.step.estimation import FROM_FORWARD_STATISTICS, Advantages, estimate_advantages
from workers.train.step.group_checks import drop_groups, filter_reasons, mask_batch


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


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LossWeights:
    """How much each token contributes to the loss, fixed for the whole optimizer batch."""

    loss_tokens: int
    """Tokens that bear loss: the divisor of metrics."""
    totals: BatchTotals
    row_factors_R: Tensor
    """float64, factor of every loss token of a row."""
    selected_RT: Tensor | None
    """bool, tokens chosen by the loss's selector; None if the loss has none."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PreparedBatch:
    """One optimizer batch after all stages of `prepare`; losses and metrics only read it.

    The one exception is `policies`: if nothing needs old log-probs earlier, the first pass over each micro-batch
    records them.
    """

    batch: Batch
    version: int
    """The policy version in training."""
    masks: Masks
    sequences: Sequences
    """Completions over the tokens that bear loss."""
    statistics: ForwardStatistics | None
    """Statistics of a forward pass without gradient; None if nothing needs them."""
    rejection: Rejection | None
    """None without rejection rules."""
    drop_reasons: dict[str, DropReason]
    """Groups that rejection left with too little to train on, by prompt id."""
    policies: PolicyComparison
    advantages: Advantages
    loss_weights: LossWeights


def prepare(
    batch: Batch,
    settings: Settings,
    version: int,
    *,
    compute_statistics: Callable[[Batch, Tensor], ForwardStatistics],
    seed: int,
) -> PreparedBatch:
    """Run the stages: masks, forward statistics, rejection, policy comparison, advantages, loss weights.

    Args:
        batch: groups that passed the filters.
        settings: of the run.
        version: the policy version in training.
        compute_statistics: makes a pass of the model without gradient over the tokens of a mask; called only if
            something needs it.
        seed: of the tokens that a loss selects at random.
    """
    masks = mask_batch(batch, settings, version)
    statistics = compute_statistics(batch, masks.loss_tokens_RT) if needs_forward_statistics(settings) else None
    rejection, drop_reasons = None, dict[str, DropReason]()
    if statistics is not None and settings.correction.rejections:
        rejection = _reject(batch, masks, statistics, settings)
        masks = reject_tokens(masks, batch.completion_ids_R, rejection.rejected_by_rule())
        reasons = filter_reasons(batch, masks, settings)
        drop_reasons = {p: r for p, r in zip(batch.prompt_ids, reasons, strict=True) if r is not None}
        batch, masks = drop_groups(batch, masks, reasons)
    sequences = Sequences(masks.loss_tokens_RT, batch.completion_ids_R)
    policies = (
        PolicyComparison.pending(batch)
        if statistics is None
        else compare_policies(batch, sequences, statistics.old_logprobs_RT, version, settings)
    )
    advantages = estimate_advantages(
        batch, masks, settings, statistics=statistics, weights_RT=None if statistics is None else policies.weights_RT
    )
    return PreparedBatch(
        batch=batch,
        version=version,
        masks=masks,
        sequences=sequences,
        statistics=statistics,
        rejection=rejection,
        drop_reasons=drop_reasons,
        policies=policies,
        advantages=advantages,
        loss_weights=weigh_tokens(batch, sequences, policies, advantages, settings, seed),
    )


def needs_forward_statistics(settings: Settings) -> bool:
    """Return whether anything before the first gradient depends on the model's output."""
    correction = settings.correction.resolved()
    return bool(
        correction.reject
        or correction.normalize
        or LOSSES[settings.loss.name].traits.selector
        or set(ESTIMATORS[settings.estimator.name].input_names) & set(FROM_FORWARD_STATISTICS)
    )


def weigh_tokens(
    batch: Batch,
    sequences: Sequences,
    policies: PolicyComparison,
    advantages: Advantages,
    settings: Settings,
    seed: int,
) -> LossWeights:
    """Fix each token's factor in the loss, and select the tokens that the loss treats differently.

    Args:
        batch: the whole batch.
        sequences: its completions over their loss tokens.
        policies: of the same; read only if the loss has a selector.
        advantages: of the same.
        settings: of the run.
        seed: of random selections.
    """
    tokens_R, weight_R = sequences.mask_RT.sum(dim=1), torch.ones_like(sequences.lengths_R, dtype=torch.float64)
    if settings.agents.weight == "rollout":
        tokens_CW = batch.branches.sum_rows(tokens_R, batch.completion_ids_R)
        weight_R = branch_weights(tokens_CW, batch.branches.main_CW)[batch.completion_ids_R]
    totals = BatchTotals(tokens=float((weight_R * tokens_R).sum()), completions=int((sequences.lengths_S > 0).sum()))
    factors_R = row_factors(
        settings.aggregation,
        sequences.lengths_R,
        totals,
        constant=settings.rollout.max_tokens,
        weight_R=weight_R,
    )
    selector, selected_RT = LOSSES[settings.loss.name].traits.selector, None
    if selector:
        selected_RT = select_tokens(
            selector,
            policies.old_logprobs_RT,
            policies.proximal_RT,
            advantages.tokens_RT,
            sequences.mask_RT,
            torch.Generator().manual_seed(seed),
            settings.loss.options,
        )
    return LossWeights(loss_tokens=int(tokens_R.sum()), totals=totals, row_factors_R=factors_R, selected_RT=selected_RT)


def _reject(batch: Batch, masks: Masks, statistics: ForwardStatistics, settings: Settings) -> Rejection:
    rules = [RejectionRule(*bounds) for bounds in settings.correction.rejections]
    sequences = Sequences(masks.loss_tokens_RT, batch.completion_ids_R)
    return reject(rules, log_ratios(statistics.old_logprobs_RT, batch.rollout_logprobs_RT, sequences))
