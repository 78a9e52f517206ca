"""From groups to what is trained on: everything that is decided of a batch before its first gradient."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from stream.validity import DropReason
from workers.settings import Settings
from workers.train.algorithms.advantages import ESTIMATORS
from workers.train.algorithms.losses import LOSSES
from workers.train.algorithms.masks import Masks
from workers.train.algorithms.rejection import Rejection, RejectionRule, reject
from workers.train.step.batch import Batch
from workers.train.step.estimation import FROM_FORWARD_STATISTICS, Advantages, estimate_advantages
from workers.train.step.forward_statistics import ForwardStatistics
from workers.train.step.objective import Objective, compare_policies
from workers.train.step.selection import drop_groups, filter_reasons, mask_batch


@dataclass(frozen=True, slots=True, eq=False)
class PreparedBatch:
    """A batch after everything that is decided before the first gradient."""

    batch: Batch
    masks: Masks
    advantages: Advantages
    objective: Objective
    rejection: Rejection | None
    dropped: dict[str, DropReason]
    """Groups that rollout correction left with too little to train on, by prompt id."""


def prepare(
    batch: Batch,
    settings: Settings,
    version: int,
    *,
    compute_statistics: Callable[[Batch, Tensor], ForwardStatistics],
    seed: int,
) -> PreparedBatch:
    """Reject, filter, weigh, estimate.

    Args:
        batch: groups that the filter kept.
        settings: of the run.
        version: the policy version that is trained.
        compute_statistics: a pass of the model without gradient over the tokens of a mask; called where something
            needs it.
        seed: of the tokens that a loss chooses by lot.
    """
    masks = mask_batch(batch, settings, version)
    seen = compute_statistics(batch, masks.loss_tokens_RT) if needs_forward_statistics(settings) else None
    rejection, dropped = None, dict[str, DropReason]()
    if seen is not None and settings.correction.resolved().reject:
        rejection = _reject(batch, masks, seen, settings)
        taken = {
            rule.name: masks.loss_tokens_RT & ~kept
            for rule, kept in zip(rejection.rules, rejection.kept_by_rule_RT, strict=True)
        }
        masks = mask_batch(batch, settings, version, taken)
        reasons = filter_reasons(batch, masks, settings)
        dropped = {p: r for p, r in zip(batch.prompt_ids, reasons, strict=True) if r is not None}
        batch = drop_groups(batch, masks, reasons)
        masks = mask_batch(batch, settings, version, taken)
    settled = (
        None if seen is None else compare_policies(batch, masks.loss_tokens_RT, seen.old_logprobs_RT, version, settings)
    )
    weights_RT = None if settled is None else settled.weights_RT
    advantages = estimate_advantages(batch, masks, settings, statistics=seen, weights_RT=weights_RT)
    objective = Objective(batch, masks, advantages, version, settings, comparison=settled, statistics=seen, seed=seed)
    return PreparedBatch(batch, masks, advantages, objective, rejection, dropped)


def needs_forward_statistics(settings: Settings) -> bool:
    """Whether anything is decided by what the model says, before the first gradient."""
    correction = settings.correction.resolved()
    return bool(
        correction.reject
        or correction.normalize
        or LOSSES[settings.loss.name].traits.selector
        or set(ESTIMATORS[settings.estimator.name].input_names) & set(FROM_FORWARD_STATISTICS)
    )


def _reject(batch: Batch, masks: Masks, seen: ForwardStatistics, settings: Settings) -> Rejection:
    return reject(
        [RejectionRule(*bounds) for bounds in settings.correction.rejections],
        seen.old_logprobs_RT,
        batch.rollout_logprobs_RT,
        masks.loss_tokens_RT,
        batch.completion_ids_R,
    )
