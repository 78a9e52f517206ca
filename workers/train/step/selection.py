"""Masks and verdicts of a batch under a run's settings: the one place where the two meet."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from stream.errors import RecordError
from stream.records import Group
from stream.validity import DropReason, TruncationReason
from workers.settings import Settings
from workers.train.algorithms.filters import FILTERS
from workers.train.algorithms.grouping import Grouping
from workers.train.algorithms.masks import DROP_REASONS, Masks, derive_masks, too_old_tokens
from workers.train.step.batch import Batch, collate
from workers.train.step.estimation import estimate_advantages, greedy_baseline
from workers.train.step.metrics import count_states

MAX_REWARD = 1e18
"""Its square is a number in float32, and so are sums of such. A larger one makes a whole step's loss not finite."""


def mask_batch(
    batch: Batch, settings: Settings, version: int, rejected_by_rule: Mapping[str, Tensor] | None = None
) -> Masks:
    """The masks of a batch that is trained at this policy version.

    Tokens older than `pacing.max_token_age` are rejected; tokens whose engine log-prob is not finite bear no loss.

    Args:
        batch: the batch.
        settings: of the run.
        version: the policy version that is trained.
        rejected_by_rule: tokens taken out by the rules of `[correction]`, by rule.
    """
    old_RT = too_old_tokens(batch.sampled_RT, batch.versions_RT, version, settings.pacing.max_token_age)
    return derive_masks(
        batch.facts,
        batch.completion_ids_R,
        batch.sampled_RT,
        truncation={reason: settings.truncation_policy(reason) for reason in TruncationReason},
        rejected_by_rule={"too_old": old_RT, **(rejected_by_rule or {})},
        not_finite_RT=~torch.isfinite(batch.rollout_logprobs_RT),
    )


def filter_reasons(batch: Batch, masks: Masks, settings: Settings) -> list[DropReason | None]:
    """For each group of the batch, why it is not worth training; None if it is.

    Counted in completions of B, after rejection and the truncation policy, before any shaping. A single completion is
    no tie: it is the singleton policy's business. Bounds on advantages look at those that a group has of its own.
    """
    groups = Grouping(batch.facts.group_ids_C, masks.baseline_C, batch.facts.num_groups)
    single_G = groups.count_G == 1
    inputs = {"rewards_C": masks.rewards_C, "groups": groups}
    chosen = settings.filter
    failing: list[tuple[DropReason, Tensor]] = [(DropReason.NO_VALID_ROW, groups.count_G == 0)]
    if settings.estimator.name == "remax":
        failing.append((DropReason.NO_BASELINE, ~greedy_baseline(batch, settings)[1]))
    if settings.algorithm.single_sample_policy == "drop":
        failing.append((DropReason.SINGLETON, single_G))
    least = {"min_valid_rows": settings.min_valid_rows}
    failing.append((DropReason.MIN_VALID_ROWS, ~FILTERS["min_valid_rows"](inputs, least)))
    if settings.drops_zero_variance:
        failing.append((DropReason.ZERO_VARIANCE, ~FILTERS["zero_variance"](inputs, {}) & ~single_G))
    low, high = chosen.mean_reward_range
    difficulty = {"min_mean_reward": low, "max_mean_reward": high}
    failing.append((DropReason.DIFFICULTY, ~FILTERS["difficulty"](inputs, difficulty)))
    bounds = {"min_advantage": chosen.advantage_range[0], "max_advantage": chosen.advantage_range[1]}
    if chosen.non_default("advantage_range"):
        inputs["advantages_C"] = estimate_advantages(batch, masks, settings).values_C
        failing.append((DropReason.ADVANTAGE, ~FILTERS["advantage_bounds"](inputs, bounds)))
    found: list[DropReason | None] = [None] * batch.facts.num_groups
    for reason, failing_G in reversed(failing):
        for group in failing_G.nonzero().squeeze(1).tolist():
            found[group] = reason
    return found


def drop_groups(batch: Batch, masks: Masks, reasons: list[DropReason | None]) -> Batch:
    """The same batch, with what still votes of these groups dropped; what does not keeps its own reason."""
    codes_G = torch.tensor([-1 if reason is None else DROP_REASONS.index(reason) for reason in reasons])
    codes_C = codes_G.to(batch.facts.drop_reason_C.device)[batch.facts.group_ids_C]
    facts = replace(
        batch.facts, drop_reason_C=torch.where((codes_C >= 0) & masks.baseline_C, codes_C, batch.facts.drop_reason_C)
    )
    return replace(batch, facts=facts)


def check_group(
    group: Group, settings: Settings, version: int, vocab_size: int
) -> tuple[DropReason | None, Counter[str]]:
    """Why this group is not worth training at this policy version (None if it is), and its completions by state.

    Raises:
        RecordError: the group cannot be trained as it stands (see `batch.collate`), a token id is not in
            the vocabulary, or a reward is beyond `MAX_REWARD`.
    """
    batch = collate([group])
    if batch.tokens_RT.numel() and not 0 <= int(batch.tokens_RT.min()) <= int(batch.tokens_RT.max()) < vocab_size:
        raise RecordError(f"group {group.prompt.id}: a token id outside of the model's vocabulary of {vocab_size}")
    masks = mask_batch(batch, settings, version)
    largest = _max_abs_reward(batch, masks)
    if not largest <= MAX_REWARD:
        raise RecordError(f"group {group.prompt.id}: a reward of {largest:g}; nothing can be computed with such a one")
    return filter_reasons(batch, masks, settings)[0], count_states(batch.facts, masks)


def _max_abs_reward(batch: Batch, masks: Masks) -> float:
    """The largest that is computed with: of completions that vote, of their parts and turns, and of greedy ones."""
    voting_R = masks.baseline_C[batch.completion_ids_R]
    parts_PC = batch.parts_PC[:, masks.baseline_C]
    used = (
        masks.rewards_C,
        parts_PC,
        parts_PC * batch.part_weights_P.unsqueeze(1),
        batch.turn_rewards_RT[voting_R],
        batch.greedy_rewards_G,
    )
    return max((float(values.abs().max()) for values in used if values.numel()), default=0.0)
