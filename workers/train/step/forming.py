"""From groups to what is trained on: everything that is decided of a batch before its first gradient."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from stream.validity import DropReason
from workers.settings import Settings
from workers.train.algorithms.advantages import ESTIMATORS
from workers.train.algorithms.losses import LOSSES
from workers.train.algorithms.masks import Masks
from workers.train.algorithms.rejection import Rejection, Rule, reject
from workers.train.step.batch import Batch
from workers.train.step.estimation import NEEDS_SURVEY, Advantages, estimate_advantages
from workers.train.step.objective import Objective, settle
from workers.train.step.selection import derive_masks, verdicts, without
from workers.train.step.survey import Survey


@dataclass(frozen=True, slots=True, eq=False)
class Formed:
    """A batch after everything that is decided before the first gradient."""

    batch: Batch
    masks: Masks
    advantages: Advantages
    objective: Objective
    rejection: Rejection | None
    dropped: dict[str, DropReason]
    """Groups that rollout correction left with too little to train on, by prompt id."""


def form(
    batch: Batch, settings: Settings, version: int, *, survey: Callable[[Batch, Tensor], Survey], seed: int
) -> Formed:
    """Reject, filter, weigh, estimate.

    Args:
        batch: groups that the filter kept.
        settings: of the run.
        version: the policy version that is trained.
        survey: a pass of the model without gradient over the tokens of a mask; called where something needs it.
        seed: of the tokens that a loss chooses by lot.
    """
    masks = derive_masks(batch, settings, version)
    seen = survey(batch, masks.tokens_RT) if needs_survey(settings) else None
    rejection, dropped = None, dict[str, DropReason]()
    if seen is not None and settings.correction.resolved().reject:
        rejection = _reject(batch, masks, seen, settings)
        taken = {
            rule.name: masks.tokens_RT & ~kept for rule, kept in zip(rejection.rules, rejection.by_rule, strict=True)
        }
        masks = derive_masks(batch, settings, version, taken)
        reasons = verdicts(batch, masks, settings)
        dropped = {p: r for p, r in zip(batch.prompt_ids, reasons, strict=True) if r is not None}
        batch = without(batch, masks, reasons)
        masks = derive_masks(batch, settings, version, taken)
    settled = None if seen is None else settle(batch, masks.tokens_RT, seen.logprobs_RT, version, settings)
    weights_RT = None if settled is None else settled.weights_RT
    advantages = estimate_advantages(batch, masks, settings, survey=seen, weights_RT=weights_RT)
    objective = Objective(batch, masks, advantages, version, settings, settled=settled, survey=seen, seed=seed)
    return Formed(batch, masks, advantages, objective, rejection, dropped)


def needs_survey(settings: Settings) -> bool:
    """Whether anything is decided by what the model says, before the first gradient."""
    correction = settings.correction.resolved()
    return bool(
        correction.reject
        or correction.normalize
        or LOSSES[settings.loss.name].declared.selector
        or set(ESTIMATORS[settings.estimator.name].needs) & set(NEEDS_SURVEY)
    )


def _reject(batch: Batch, masks: Masks, seen: Survey, settings: Settings) -> Rejection:
    return reject(
        [Rule(rule.rule, rule.lower, rule.upper) for rule in settings.correction.resolved().reject],
        seen.logprobs_RT,
        batch.behaviour_logprobs_RT,
        masks.tokens_RT,
        batch.completion_ids_R,
    )
