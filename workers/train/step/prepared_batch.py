"""Everything about an optimizer batch that is decided before its first gradient."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stream.validity import DropReason
from workers.settings import Settings
from workers.train.algorithms.advantages import ESTIMATORS
from workers.train.algorithms.aggregation import BatchTotals, row_factors
from workers.train.algorithms.losses import LOSSES
from workers.train.algorithms.masks import Masks, reject_tokens
from workers.train.algorithms.ratios import log_ratios
from workers.train.algorithms.rejection import Rejection, RejectionRule, reject
from workers.train.algorithms.sequences import Sequences
from workers.train.algorithms.token_selection import select_tokens
from workers.train.step.batch import Batch, ForwardStatistics
from workers.train.step.estimation import FROM_FORWARD_STATISTICS, Advantages, estimate_advantages
from workers.train.step.group_checks import drop_groups, filter_reasons, mask_batch
from workers.train.step.policy_comparison import PolicyComparison, compare_policies


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LossWeights:
    """How much each token contributes to the loss, fixed for the whole optimizer batch."""

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
    """Of a pass without gradient; None if nothing needs one."""
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
        loss_weights=weigh_tokens(sequences, policies, advantages, settings, seed),
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
    sequences: Sequences, policies: PolicyComparison, advantages: Advantages, settings: Settings, seed: int
) -> LossWeights:
    """Fix each token's factor in the loss, and select the tokens that the loss treats differently.

    Args:
        sequences: completions over the loss tokens of the whole batch.
        policies: of the same; read only if the loss has a selector.
        advantages: of the same.
        settings: of the run.
        seed: of random selections.
    """
    totals = BatchTotals(tokens=int(sequences.mask_RT.sum()), completions=int((sequences.lengths_S > 0).sum()))
    factors_R = row_factors(
        settings.aggregation,
        sequences.lengths_R,
        totals,
        constant=settings.rollout.max_tokens,
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
    return LossWeights(totals=totals, row_factors_R=factors_R, selected_RT=selected_RT)


def _reject(batch: Batch, masks: Masks, statistics: ForwardStatistics, settings: Settings) -> Rejection:
    rules = [RejectionRule(*bounds) for bounds in settings.correction.rejections]
    sequences = Sequences(masks.loss_tokens_RT, batch.completion_ids_R)
    return reject(rules, log_ratios(statistics.old_logprobs_RT, batch.rollout_logprobs_RT, sequences))
