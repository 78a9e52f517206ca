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
from workers.train.grouping import Grouping

REWARD_REASONS: Final = tuple(RewardReason)
ROLLOUT_REASONS: Final = tuple(RolloutReason)
TRUNCATION_REASONS: Final = tuple(TruncationReason)
DROP_REASONS: Final = tuple(DropReason)
POLICIES: Final = ("exclude", "keep", "zero_reward", "baseline_only")
NONE: Final = -1
"""The code of "no such fact"; other codes are positions in the tuples above."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Facts:
    """What producers said of each completion; nobody has interpreted it yet.

    Example, three completions of one prompt: right, verifier crashed, cut off by its token limit::

        rewards_C        [1.0, 0.0, 0.0]      0.0 means nothing in the second, and was measured in the third
        measured_C       [True, False, True]
        reward_reason_C  [-1, 0, -1]          0 is REWARD_REASONS[0], "raised"
        truncated_C      [-1, -1, 0]
    """

    group_ids_C: Tensor
    """int64 codes 0 ... groups - 1."""
    groups: int
    rewards_C: Tensor
    """float64; means something where `measured_C` alone."""
    measured_C: Tensor
    """bool."""
    reward_reason_C: Tensor
    """int64, code into `REWARD_REASONS`, or `NONE`."""
    failed_C: Tensor
    """int64, code into `ROLLOUT_REASONS`, or `NONE`."""
    truncated_C: Tensor
    """int64, code into `TRUNCATION_REASONS`, or `NONE`."""
    dropped_C: Tensor
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
    rejected_C: Tensor
    """bool: would be in B, but token-level rejection left it no token."""
    rewards_C: Tensor
    """float64, after the truncation policy; 0.0 outside of B."""
    tokens_RT: Tensor
    """bool: tokens that bear loss."""
    loss_R: Tensor
    """bool: rows with such a token."""


def derive(
    facts: Facts,
    completion_ids_R: Tensor,
    sampled_RT: Tensor,
    *,
    truncation: Mapping[TruncationReason, str],
    rejected_RT: Tensor | None = None,
    unusable_RT: Tensor | None = None,
) -> Masks:
    """Derive the masks of a batch.

    Args:
        facts: of the completions.
        completion_ids_R: int64, the completion that each row belongs to.
        sampled_RT: bool, tokens that the policy sampled.
        truncation: what becomes of a completion cut short for each reason: `exclude`, `keep`, `zero_reward` or
            `baseline_only`; `keep` where it is not named.
        rejected_RT: bool, tokens taken out by a rule (too old, rollout correction). A row left with no token is
            rejected; a completion left with no row is out of B.
        unusable_RT: bool, tokens whose data for the loss are junk. The same, but for completions that bear no loss:
            nobody looks at their log-probs.

    Returns:
        The masks. Rewards outside of B are replaced by 0.0 here, before anybody computes with them.

    Raises:
        ValueError: a truncation policy that does not exist.
    """
    kept_RT = sampled_RT if rejected_RT is None else sampled_RT & ~rejected_RT
    usable_RT = kept_RT if unusable_RT is None else kept_RT & ~unusable_RT
    silent_C = _under(facts.truncated_C, truncation, "baseline_only")
    surviving_C = torch.where(
        silent_C,
        _any_row(facts, completion_ids_R, kept_RT),
        _any_row(facts, completion_ids_R, usable_RT),
    )
    eligible_C = (
        facts.measured_C
        & torch.isfinite(facts.rewards_C)
        & (facts.failed_C == NONE)
        & (facts.dropped_C == NONE)
        & ~_under(facts.truncated_C, truncation, "exclude")
    )
    baseline_C = eligible_C & surviving_C
    loss_C = baseline_C & ~silent_C
    zeroed_C = _under(facts.truncated_C, truncation, "zero_reward")
    tokens_RT = usable_RT & loss_C[completion_ids_R].unsqueeze(1)
    return Masks(
        baseline_C=baseline_C,
        loss_C=loss_C,
        rejected_C=eligible_C & ~surviving_C,
        rewards_C=torch.where(baseline_C & ~zeroed_C, facts.rewards_C, 0.0),
        tokens_RT=tokens_RT,
        loss_R=tokens_RT.any(dim=1),
    )


def too_old(sampled_RT: Tensor, versions_RT: Tensor, version: int, max_token_age: int) -> Tensor:
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


def select_groups(
    facts: Facts, masks: Masks, *, min_valid_rows: int, drop_zero_variance: bool, singleton: str
) -> list[DropReason | None]:
    """Which groups are not worth training, and why; None for those that are.

    Counted in completions of B, after the truncation policy and before any shaping. A single completion is no tie: it
    is the singleton policy's business.

    Args:
        facts: of the completions.
        masks: of the same.
        min_valid_rows: groups with fewer completions in B are dropped.
        drop_zero_variance: drop groups whose rewards in B are all equal.
        singleton: `drop` drops a group with one completion in B.
    """
    groups = Grouping(facts.group_ids_C, masks.baseline_C, facts.groups)
    tied = groups.tied(masks.rewards_C).tolist()
    verdicts: list[DropReason | None] = []
    for count, tie in zip(groups.count_G.tolist(), tied, strict=True):
        if count == 0:
            verdicts.append(DropReason.NO_VALID_ROW)
        elif count == 1 and singleton == "drop":
            verdicts.append(DropReason.SINGLETON)
        elif count < min_valid_rows:
            verdicts.append(DropReason.MIN_VALID_ROWS)
        elif drop_zero_variance and tie and count > 1:
            verdicts.append(DropReason.ZERO_VARIANCE)
        else:
            verdicts.append(None)
    return verdicts


def _under(truncated_C: Tensor, truncation: Mapping[TruncationReason, str], policy: str) -> Tensor:
    """Completions that were truncated for a reason under this policy."""
    unknown = sorted(set(truncation.values()) - set(POLICIES))
    if unknown:
        raise ValueError(f"unknown truncation policy {unknown[0]!r}; use one of {', '.join(POLICIES)}")
    table = [truncation.get(reason, "keep") == policy for reason in TRUNCATION_REASONS]
    # The last place answers the code of "not truncated", which is -1.
    return torch.tensor([*table, False], device=truncated_C.device)[truncated_C]


def _any_row(facts: Facts, completion_ids_R: Tensor, tokens_RT: Tensor) -> Tensor:
    """Completions with one of these tokens in any of their rows."""
    found_C = torch.zeros_like(facts.measured_C)
    found_C[completion_ids_R[tokens_RT.any(dim=1)]] = True
    return found_C
