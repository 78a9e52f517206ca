"""Masks: which completions count in a baseline and which tokens bear loss. Derived here and nowhere else.

* **B**, the baseline mask, per completion: the rollout succeeded, the completion was not dropped, its reward is
  measured, a token is left to train, and it is not truncated under the policy `exclude` or `zero_reward`.
* **L**, the loss mask: B without completions truncated under the policy `baseline_only`, and with those truncated under
  `zero_reward` that would be in B without it. These are the only completions in L that are not in B: they are trained
  at the reward 0 (`estimation.py`), and nothing that is computed for another completion reads them.
* The token mask: sampled tokens of completions in L that no rejection rule took out.

Facts about a completion are independent of one another, so an invalid completion keeps all of its facts instead of one
combined state.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from stream.validity import DropReason, RewardReason, RolloutReason, TruncationReason

REWARD_REASONS: Final = tuple(RewardReason)
ROLLOUT_REASONS: Final = tuple(RolloutReason)
TRUNCATION_REASONS: Final = tuple(TruncationReason)
DROP_REASONS: Final = tuple(DropReason)
TRUNCATION_POLICIES: Final = (
    "exclude",
    "keep",
    "zero_reward",
    "zero_reward_in_baseline",
    "penalty",
    "baseline_only",
)
NONE: Final = -1
"""Code for "no reason"; other codes are positions in the tuples above."""
EMPTY_RULE: Final = "no_token"
"""Rule that rejects completions without a sampled token."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CompletionFacts:
    """What rollout and score reported about each completion, before any interpretation.

    Example, three completions of one prompt: right, verifier crashed, cut off by the token limit::

        rewards_C            [1.0, 0.0, 0.0]      the second 0.0 is a placeholder, the third was measured
        measured_C           [True, False, True]
        reward_reason_C      [-1, 0, -1]          0 is REWARD_REASONS[0], "raised"
        truncation_reason_C  [-1, -1, 0]
    """

    group_ids_C: Tensor
    """int64 codes 0 ... num_groups - 1."""
    num_groups: int
    rewards_C: Tensor
    """float64; meaningful only where `measured_C`."""
    measured_C: Tensor
    """bool."""
    reward_reason_C: Tensor
    """int64, code into `REWARD_REASONS`, or `NONE`."""
    rollout_reason_C: Tensor
    """int64, code into `ROLLOUT_REASONS`, or `NONE`."""
    truncation_reason_C: Tensor
    """int64, code into `TRUNCATION_REASONS`, or `NONE`."""
    drop_reason_C: Tensor
    """int64, code into `DROP_REASONS`, or `NONE`."""
    turns_C: Tensor
    """int64, turns of the model."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Masks:
    """What counts, for every consumer."""

    baseline_C: Tensor
    """bool, B: the completion counts in baselines."""
    loss_C: Tensor
    """bool, L: the completion may bear loss."""
    rejected_by_C: Tensor
    """int64, position in `rules` of the rule that rejected the last token of a completion otherwise in B or L, or
    `NONE`."""
    token_rejected_by_RT: Tensor
    """int8, position in `rules` of the first rule that rejected a sampled token of such a completion, or `NONE`."""
    rules: tuple[str, ...]
    """Names of the rules that were applied, in order."""
    zeroed_C: Tensor
    """bool: in B, with reward 0 from the truncation policy `zero_reward_in_baseline`."""
    penalised_C: Tensor
    """bool: in B, truncated under the policy `penalty`."""
    rewards_C: Tensor
    """float64, after the truncation policy; 0.0 outside B."""
    baseline_tokens_RT: Tensor
    """bool: sampled, not rejected tokens of completions in B; completion lengths count these."""
    loss_tokens_RT: Tensor
    """bool: the same of completions in L, the tokens that bear loss."""
    loss_rows_R: Tensor
    """bool: rows with a token that bears loss."""

    @property
    def used_C(self) -> Tensor:
        """bool: completions in B or L."""
        return self.baseline_C | self.loss_C

    @property
    def outside_C(self) -> Tensor:
        """bool: completions in L and not in B, truncated under the policy `zero_reward`."""
        return self.loss_C & ~self.baseline_C


def derive_masks(
    facts: CompletionFacts,
    completion_ids_R: Tensor,
    sampled_RT: Tensor,
    *,
    truncation: Mapping[TruncationReason, str],
    rejected_by_rule: Mapping[str, Tensor] | None = None,
    not_finite_RT: Tensor | None = None,
) -> Masks:
    """Derive the masks of a batch.

    Args:
        facts: of the completions.
        completion_ids_R: int64, the completion that each row belongs to.
        sampled_RT: bool, tokens that the policy sampled.
        truncation: policy for each truncation reason, one of `TRUNCATION_POLICIES`; `keep` if absent.
        rejected_by_rule: bool (R, T) by rule name, tokens to reject, as for `reject_tokens`.
        not_finite_RT: bool, tokens with unusable log-probs, rejected by the last rule, `not_finite`. Completions that
            bear no loss under `baseline_only` are exempt, because nothing reads their log-probs.

    Returns:
        The masks. Rewards outside B are replaced by 0.0 before any computation.

    Raises:
        ValueError: unknown truncation policy.
    """
    baseline_only_C = _has_policy(facts.truncation_reason_C, truncation, "baseline_only")
    accepted_C = (
        facts.measured_C
        & torch.isfinite(facts.rewards_C)
        & (facts.rollout_reason_C == NONE)
        & (facts.drop_reason_C == NONE)
        & ~_has_policy(facts.truncation_reason_C, truncation, "exclude")
    )
    sampled_R = sampled_RT.any(dim=1)
    used_C = accepted_C & _has_row(sampled_R, completion_ids_R, len(accepted_C))
    baseline_C = used_C & ~_has_policy(facts.truncation_reason_C, truncation, "zero_reward")
    zeroed_C = baseline_C & _has_policy(facts.truncation_reason_C, truncation, "zero_reward_in_baseline")
    loss_C = used_C & ~baseline_only_C
    masks = Masks(
        baseline_C=baseline_C,
        loss_C=loss_C,
        rejected_by_C=torch.where(accepted_C & ~used_C, 0, NONE),
        token_rejected_by_RT=torch.full_like(sampled_RT, NONE, dtype=torch.int8),
        rules=(EMPTY_RULE,),
        zeroed_C=zeroed_C,
        penalised_C=baseline_C & _has_policy(facts.truncation_reason_C, truncation, "penalty"),
        rewards_C=torch.where(baseline_C & ~zeroed_C, facts.rewards_C, 0.0),
        baseline_tokens_RT=sampled_RT & baseline_C[completion_ids_R].unsqueeze(1),
        loss_tokens_RT=sampled_RT & loss_C[completion_ids_R].unsqueeze(1),
        loss_rows_R=sampled_R & loss_C[completion_ids_R],
    )
    rules = dict(rejected_by_rule or {})
    if not_finite_RT is not None:
        rules["not_finite"] = not_finite_RT & ~baseline_only_C[completion_ids_R].unsqueeze(1)
    return reject_tokens(masks, completion_ids_R, rules) if rules else masks


def reject_tokens(masks: Masks, completion_ids_R: Tensor, rejected_by_rule: Mapping[str, Tensor]) -> Masks:
    """Apply further rejection rules.

    A row without a token left bears no loss; a completion without a row left leaves B and L, and the rule that took its
    last token is recorded for it.

    Args:
        masks: before these rules.
        completion_ids_R: int64, the completion that each row belongs to.
        rejected_by_rule: bool (R, T) by rule name, tokens that the rule rejects, in the order of blame.
    """
    used_C, rejected_by_C = masks.used_C, masks.rejected_by_C
    kept_RT = masks.baseline_tokens_RT | masks.loss_tokens_RT
    token_rejected_by_RT = masks.token_rejected_by_RT
    for code, rejected_RT in enumerate(rejected_by_rule.values(), start=len(masks.rules)):
        token_rejected_by_RT = torch.where(kept_RT & rejected_RT, code, token_rejected_by_RT)
        kept_RT = kept_RT & ~rejected_RT
        emptied_C = used_C & ~_has_row(kept_RT.any(dim=1), completion_ids_R, len(used_C))
        rejected_by_C = torch.where(emptied_C, code, rejected_by_C)
        used_C = used_C & ~emptied_C
    rejected = replace(
        masks,
        rejected_by_C=rejected_by_C,
        token_rejected_by_RT=token_rejected_by_RT,
        rules=(*masks.rules, *rejected_by_rule),
        baseline_tokens_RT=masks.baseline_tokens_RT & kept_RT,
        loss_tokens_RT=masks.loss_tokens_RT & kept_RT,
    )
    return _restrict(rejected, completion_ids_R, used_C)


def drop_completions(masks: Masks, completion_ids_R: Tensor, dropped_C: Tensor) -> Masks:
    """Remove completions (bool, C) from B and L; a completion that a rule rejected keeps that rule."""
    return _restrict(masks, completion_ids_R, masks.used_C & ~dropped_C)


def only_baseline(masks: Masks, completion_ids_R: Tensor) -> Masks:
    """Return the masks without completions outside B, as if these had never been: what all statistics are over."""
    return _restrict(masks, completion_ids_R, masks.baseline_C) if bool(masks.outside_C.any()) else masks


def too_old_tokens(sampled_RT: Tensor, versions_RT: Tensor, version: int, max_token_age: int) -> Tensor:
    """Return sampled tokens more than `max_token_age` policy versions older than `version`; none if that is 0.

    Args:
        sampled_RT: bool.
        versions_RT: the policy version that sampled each token.
        version: the policy version in training.
        max_token_age: in versions.
    """
    if max_token_age == 0:
        return torch.zeros_like(sampled_RT)
    return sampled_RT & (version - versions_RT > max_token_age)


def _restrict(masks: Masks, completion_ids_R: Tensor, used_C: Tensor) -> Masks:
    """Intersect every mask with a smaller set of completions."""
    used_R1 = used_C[completion_ids_R].unsqueeze(1)
    loss_tokens_RT = masks.loss_tokens_RT & used_R1
    return replace(
        masks,
        baseline_C=masks.baseline_C & used_C,
        loss_C=masks.loss_C & used_C,
        zeroed_C=masks.zeroed_C & used_C,
        penalised_C=masks.penalised_C & used_C,
        rewards_C=torch.where(used_C, masks.rewards_C, 0.0),
        baseline_tokens_RT=masks.baseline_tokens_RT & used_R1,
        loss_tokens_RT=loss_tokens_RT,
        loss_rows_R=loss_tokens_RT.any(dim=1),
    )


def _has_policy(truncation_reason_C: Tensor, truncation: Mapping[TruncationReason, str], policy: str) -> Tensor:
    """Return completions truncated for a reason with this policy."""
    unknown = sorted(set(truncation.values()) - set(TRUNCATION_POLICIES))
    if unknown:
        raise ValueError(f"unknown truncation policy {unknown[0]!r}; use one of {', '.join(TRUNCATION_POLICIES)}")
    table = [truncation.get(reason, "keep") == policy for reason in TRUNCATION_REASONS]
    # Index -1, the code of "not truncated", reads the last entry.
    return torch.tensor([*table, False], device=truncation_reason_C.device)[truncation_reason_C]


def _has_row(rows_R: Tensor, completion_ids_R: Tensor, num_completions: int) -> Tensor:
    """Return completions with one of these rows."""
    has_row_C = torch.zeros(num_completions, dtype=torch.bool, device=rows_R.device)
    has_row_C[completion_ids_R[rows_R]] = True
    return has_row_C
