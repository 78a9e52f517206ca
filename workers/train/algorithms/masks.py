"""What may vote in a baseline and what may bear loss: derived once, handed to everybody, never derived again.

* **B**, the baseline mask, by completion: rollout ok, not dropped, reward measured, a token left to train, and not
  truncated under the policy `exclude`.
* **L**, the loss mask: B without the truncation policy `baseline_only`. L is a subset of B.
* The token mask: sampled tokens of rows in L that no rule of token-level rejection took out.

The facts are independent of one another, so an invalid completion is described by all of its facts, not by one state.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from stream.validity import DropReason, RewardReason, RolloutReason, TruncationReason

REWARD_REASONS: Final = tuple(RewardReason)
ROLLOUT_REASONS: Final = tuple(RolloutReason)
TRUNCATION_REASONS: Final = tuple(TruncationReason)
DROP_REASONS: Final = tuple(DropReason)
TRUNCATION_POLICIES: Final = ("exclude", "keep", "zero_reward", "penalty", "baseline_only")
NONE: Final = -1
"""The code of "no such fact"; other codes are positions in the tuples above."""
NO_TOKEN_RULE: Final = "no_token"  # noqa: S105
"""The rule that rejects completions in which nothing was sampled."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CompletionFacts:
    """What producers said of each completion; nobody has interpreted it yet.

    Example, three completions of one prompt: right, verifier crashed, cut off by its token limit::

        rewards_C        [1.0, 0.0, 0.0]      0.0 means nothing in the second, and was measured in the third
        measured_C       [True, False, True]
        reward_reason_C  [-1, 0, -1]          0 is REWARD_REASONS[0], "raised"
        truncated_C      [-1, -1, 0]
    """

    group_ids_C: Tensor
    """int64 codes 0 ... groups - 1."""
    num_groups: int
    rewards_C: Tensor
    """float64; means something where `measured_C` alone."""
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
    """What every consumer is handed; nothing else decides what counts."""

    baseline_C: Tensor
    """bool, B: may vote."""
    loss_C: Tensor
    """bool, L: may bear loss."""
    rejected_by_C: Tensor
    """int64: would be in B, but this rule (a position in `rules`) took its last token; `NONE` elsewhere."""
    rules: tuple[str, ...]
    """Names of the rules that took tokens out."""
    zeroed_C: Tensor
    """bool: in B, with the reward 0 that the truncation policy gave it."""
    penalised_C: Tensor
    """bool: in B, cut short under the policy `penalty`."""
    rewards_C: Tensor
    """float64, after the truncation policy; 0.0 outside of B."""
    baseline_tokens_RT: Tensor
    """bool: tokens of completions in B that no rule took out; what a completion's length is counted in."""
    loss_tokens_RT: Tensor
    """bool: tokens that bear loss: the same in L."""
    loss_rows_R: Tensor
    """bool: rows with such a token."""


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
        truncation: what becomes of a completion cut short for each reason, one of `POLICIES`; `keep` where it is not
            named.
        rejected_by_rule: bool (R, T) by rule, tokens that it took out (too old, rollout correction), in the order in
            which the
            rules are blamed. A row left with no token is rejected; a completion left with no row is out of B.
        not_finite_RT: bool, tokens whose data for the loss are junk: one more rule, `not_finite`, but not for
            completions that bear no loss, whose log-probs nobody looks at.

    Returns:
        The masks. Rewards outside of B are replaced by 0.0 here, before anybody computes with them.

    Raises:
        ValueError: a truncation policy that does not exist.
    """
    silent_C = _has_policy(facts.truncation_reason_C, truncation, "baseline_only")
    rules = {NO_TOKEN_RULE: torch.zeros_like(sampled_RT), **(rejected_by_rule or {})}
    if not_finite_RT is not None:
        rules["not_finite"] = not_finite_RT & ~silent_C[completion_ids_R].unsqueeze(1)
    eligible_C = (
        facts.measured_C
        & torch.isfinite(facts.rewards_C)
        & (facts.rollout_reason_C == NONE)
        & (facts.drop_reason_C == NONE)
        & ~_has_policy(facts.truncation_reason_C, truncation, "exclude")
    )
    kept_RT, rejected_C = sampled_RT, torch.full_like(facts.drop_reason_C, NONE)
    for code, taken_RT in enumerate(rules.values()):
        kept_RT = kept_RT & ~taken_RT
        emptied_C = eligible_C & (rejected_C == NONE) & ~_has_token(facts, completion_ids_R, kept_RT)
        rejected_C = torch.where(emptied_C, code, rejected_C)
    baseline_C = eligible_C & (rejected_C == NONE)
    loss_C = baseline_C & ~silent_C
    zeroed_C = baseline_C & _has_policy(facts.truncation_reason_C, truncation, "zero_reward")
    tokens_RT = kept_RT & loss_C[completion_ids_R].unsqueeze(1)
    return Masks(
        baseline_C=baseline_C,
        loss_C=loss_C,
        rejected_by_C=rejected_C,
        rules=tuple(rules),
        zeroed_C=zeroed_C,
        penalised_C=baseline_C & _has_policy(facts.truncation_reason_C, truncation, "penalty"),
        rewards_C=torch.where(baseline_C & ~zeroed_C, facts.rewards_C, 0.0),
        baseline_tokens_RT=kept_RT & baseline_C[completion_ids_R].unsqueeze(1),
        loss_tokens_RT=tokens_RT,
        loss_rows_R=tokens_RT.any(dim=1),
    )


def too_old_tokens(sampled_RT: Tensor, versions_RT: Tensor, version: int, max_token_age: int) -> Tensor:
    """Sampled tokens more than `max_token_age` policy versions older than `version`; none if that is 0.

    Args:
        sampled_RT: bool.
        versions_RT: the policy version that sampled each token.
        version: the policy version that is being trained.
        max_token_age: in versions.
    """
    if max_token_age == 0:
        return torch.zeros_like(sampled_RT)
    return sampled_RT & (version - versions_RT > max_token_age)


def _has_policy(truncated_C: Tensor, truncation: Mapping[TruncationReason, str], policy: str) -> Tensor:
    """Completions that were truncated for a reason under this policy."""
    unknown = sorted(set(truncation.values()) - set(TRUNCATION_POLICIES))
    if unknown:
        raise ValueError(f"unknown truncation policy {unknown[0]!r}; use one of {', '.join(TRUNCATION_POLICIES)}")
    table = [truncation.get(reason, "keep") == policy for reason in TRUNCATION_REASONS]
    # The last place answers the code of "not truncated", which is -1.
    return torch.tensor([*table, False], device=truncated_C.device)[truncated_C]


def _has_token(facts: CompletionFacts, completion_ids_R: Tensor, tokens_RT: Tensor) -> Tensor:
    """Completions with one of these tokens in any of their rows."""
    found_C = torch.zeros_like(facts.measured_C)
    found_C[completion_ids_R[tokens_RT.any(dim=1)]] = True
    return found_C
