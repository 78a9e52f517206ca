"""Masks of a batch under a run's settings, and the checks that decide whether a group is worth training on."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from stream.errors import RecordError
from stream.records import Group, TrainedCompletion, TrainedRow
from stream.validity import DropReason, TruncationReason
from workers.settings import Settings
from workers.train.algorithms.grouping import Grouping
from workers.train.algorithms.masks import (
    DROP_REASONS,
    NONE,
    REWARD_REASONS,
    ROLLOUT_REASONS,
    TRUNCATION_REASONS,
    CompletionFacts,
    Masks,
    derive_masks,
    drop_completions,
    too_old_tokens,
)
from workers.train.algorithms.shaping import FILTERS
from workers.train.step.batch import Batch, collate, reward_reason
from workers.train.step.branches import branch_rule
from workers.train.step.estimation import estimate_advantages, greedy_baseline
from workers.train.step.reward_parts import PartTable, greedy_completion, measured_value, with_bounded_rewards


class GroupRewards(NamedTuple):
    """Rewards of one group's completions after the truncation policy, for metrics of filtered groups."""

    rewards_C: Tensor
    """float64; 0 outside B."""
    baseline_C: Tensor
    """bool, B."""
    parts: PartTable
    """Parts of the rewards."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CheckedGroup:
    """A group as `check_group` collated and judged it; `batch.merge_batches` makes an optimizer batch of several."""

    batch: Batch
    """The group alone."""
    drop_reason: DropReason | None
    """Why the group is not worth training on; None if it is."""
    rewards: GroupRewards
    states: Sequence[str]
    """State of each completion, as in the metrics `rows/*`."""
    without_loss: Counter[str]
    """Number of completions that bear no loss, as `count_without_loss`."""


def check_group(group: Group, settings: Settings, version: int, vocab_size: int) -> CheckedGroup:
    """Collate and mask a group, and decide whether it is worth training on at this policy version.

    Raises:
        RecordError: the group cannot be trained on (see `batch.collate`), or a token id is not in the vocabulary.
    """
    batch = collate([with_bounded_rewards(group)])
    if batch.tokens_RT.numel() and not 0 <= int(batch.tokens_RT.min()) <= int(batch.tokens_RT.max()) < vocab_size:
        raise RecordError(f"group {group.prompt.id}: a token id outside of the model's vocabulary of {vocab_size}")
    masks = mask_batch(batch, settings, version)
    return CheckedGroup(
        batch=batch,
        drop_reason=filter_reasons(batch, masks, settings)[0],
        rewards=GroupRewards(masks.rewards_C, masks.baseline_C, batch.parts),
        states=_states(batch.facts, masks),
        without_loss=count_without_loss(batch, masks).get(group.prompt.id, Counter()),
    )


def mask_batch(batch: Batch, settings: Settings, version: int) -> Masks:
    """Derive the masks of a batch at a policy version.

    Tokens of discarded branches bear no loss, and neither do tokens older than `pacing.max_token_age`, or whose rollout
    log-prob is not finite. A token is blamed on the first of these.
    """
    discarded = batch.branches.discarded_rows(batch.completion_ids_R)
    of_branches = {branch_rule(reason): batch.sampled_RT & rows_R.unsqueeze(1) for reason, rows_R in discarded.items()}
    too_old_RT = too_old_tokens(batch.sampled_RT, batch.versions_RT, version, settings.pacing.max_token_age)
    return derive_masks(
        batch.facts,
        batch.completion_ids_R,
        batch.sampled_RT,
        truncation={reason: settings.truncation_policy(reason) for reason in TruncationReason},
        rejected_by_rule=of_branches | {"too_old": too_old_RT},
        not_finite_RT=~torch.isfinite(batch.rollout_logprobs_RT),
    )


def filter_reasons(batch: Batch, masks: Masks, settings: Settings) -> list[DropReason | None]:
    """Return for each group why it is not worth training on, or None.

    Counts completions in B, after rejection and the truncation policy, before reward shaping. A single completion is no
    tie; `algorithm.single_sample_policy` decides about it. Advantage bounds apply to the group's own advantages.
    """
    groups = Grouping(batch.facts.group_ids_C, masks.baseline_C, batch.facts.num_groups)
    single_G = groups.count_G == 1
    inputs = {"rewards_C": masks.rewards_C, "groups": groups}
    limits = settings.filter
    failing: list[tuple[DropReason, Tensor]] = [(DropReason.NO_VALID_ROW, groups.count_G == 0)]
    if settings.estimator.name == "remax":
        failing.append((DropReason.NO_BASELINE, ~greedy_baseline(batch, settings)[1]))
    if settings.algorithm.single_sample_policy == "drop":
        failing.append((DropReason.SINGLETON, single_G))
    minimum = {"min_valid_rows": settings.min_valid_rows}
    failing.append((DropReason.MIN_VALID_ROWS, ~FILTERS["min_valid_rows"](inputs, minimum)))
    if settings.drops_zero_variance:
        failing.append((DropReason.ZERO_VARIANCE, ~FILTERS["zero_variance"](inputs, {}) & ~single_G))
    lowest, highest = limits.mean_reward_range
    difficulty = {"min_mean_reward": lowest, "max_mean_reward": highest}
    failing.append((DropReason.DIFFICULTY, ~FILTERS["difficulty"](inputs, difficulty)))
    bounds = {"min_advantage": limits.advantage_range[0], "max_advantage": limits.advantage_range[1]}
    if limits.non_default("advantage_range"):
        inputs["advantages_C"] = estimate_advantages(batch, masks, settings).values_C
        failing.append((DropReason.ADVANTAGE, ~FILTERS["advantage_bounds"](inputs, bounds)))
    reasons: list[DropReason | None] = [None] * batch.facts.num_groups
    for reason, failing_G in reversed(failing):
        for group in failing_G.nonzero().squeeze(1).tolist():
            reasons[group] = reason
    return reasons


def drop_groups(batch: Batch, masks: Masks, reasons: Sequence[DropReason | None]) -> tuple[Batch, Masks]:
    """Drop the completions in B or L of groups with a reason; all others keep their own reason."""
    codes_G = torch.tensor([NONE if reason is None else DROP_REASONS.index(reason) for reason in reasons])
    codes_C = codes_G.to(batch.facts.drop_reason_C.device)[batch.facts.group_ids_C]
    dropped_C = (codes_C != NONE) & masks.used_C
    facts = replace(batch.facts, drop_reason_C=torch.where(dropped_C, codes_C, batch.facts.drop_reason_C))
    return replace(batch, facts=facts), drop_completions(masks, batch.completion_ids_R, dropped_C)


def count_states(facts: CompletionFacts, masks: Masks) -> Counter[str]:
    """Count completions by state; each counts once, under the first of its facts in the order of `_state`."""
    return Counter(_states(facts, masks))


def count_without_loss(batch: Batch, masks: Masks) -> dict[str, Counter[str]]:
    """Count completions that bear no loss, by prompt id and reason.

    A valid completion of a group that was dropped does not count: the reasons of its siblings do.
    """
    facts, counts = batch.facts, dict[str, Counter[str]]()
    truncated = facts.truncation_reason_C.tolist()
    columns = zip(facts.group_ids_C.tolist(), _states(facts, masks), truncated, masks.loss_C.tolist(), strict=True)
    for group, state, reason, has_loss in columns:
        if not has_loss and not state.startswith("dropped:"):
            # In B but not in L: truncated under the policy `baseline_only`.
            why = f"truncated:{TRUNCATION_REASONS[reason]}" if state == "valid" else state
            counts.setdefault(batch.prompt_ids[group], Counter())[why] += 1
    return counts


def describe_completions(
    batch: Batch, masks: Masks, advantages_C: Tensor, rows: Sequence[tuple[TrainedRow, ...]] | None = None
) -> dict[str, list[TrainedCompletion]]:
    """Return what a step does with each completion of its batch, by prompt id.

    Args:
        batch: the batch.
        masks: its final masks.
        advantages_C: of the completions.
        rows: what it does with the tokens of each completion; None: that is not recorded.
    """
    zeros_C = torch.zeros_like(batch.facts.group_ids_C)
    tokens_C = zeros_C.index_add(0, batch.completion_ids_R, masks.loss_tokens_RT.sum(dim=1))
    columns = zip(
        batch.facts.group_ids_C.tolist(),
        _states(batch.facts, masks),
        advantages_C.tolist(),
        tokens_C.tolist(),
        rows or [()] * len(tokens_C),
        strict=True,
    )
    found: dict[str, list[TrainedCompletion]] = {}
    for group, state, advantage, tokens, of_completion in columns:
        known = advantage if tokens and math.isfinite(advantage) else None
        trained = TrainedCompletion(state, known, tokens, of_completion)
        found.setdefault(batch.prompt_ids[group], []).append(trained)
    return found


def unusable_greedy(group: Group, settings: Settings) -> list[str]:
    """Return why the group's greedy completion cannot be a baseline; empty if it can, or if there is none."""
    greedy = greedy_completion(group)
    if greedy is None:
        return []
    if greedy.failure is not None:
        return [f"failed:{greedy.failure.reason}"]
    if measured_value(greedy.reward) is None:
        return [f"reward:{reward_reason(greedy)}"]
    if greedy.truncated is not None and settings.truncation_policy(greedy.truncated) == "exclude":
        return [f"truncated:{greedy.truncated}"]
    return []


def _states(facts: CompletionFacts, masks: Masks) -> list[str]:
    columns = zip(
        facts.drop_reason_C.tolist(),
        facts.rollout_reason_C.tolist(),
        facts.reward_reason_C.tolist(),
        facts.truncation_reason_C.tolist(),
        masks.rejected_by_C.tolist(),
        masks.used_C.tolist(),
        strict=True,
    )
    return [_state(*column, rules=masks.rules) for column in columns]


def _state(
    dropped: int, failed: int, unmeasured: int, truncated: int, rejected: int, valid: bool, *, rules: Sequence[str]
) -> str:
    if valid:
        return "valid"
    if dropped != NONE:
        return f"dropped:{DROP_REASONS[dropped]}"
    if failed != NONE:
        return f"failed:{ROLLOUT_REASONS[failed]}"
    if unmeasured != NONE:
        return f"reward:{REWARD_REASONS[unmeasured]}"
    if rejected != NONE:
        return f"rejected:{rules[rejected]}"
    return f"truncated:{TRUNCATION_REASONS[truncated]}"
