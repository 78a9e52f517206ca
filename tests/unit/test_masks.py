"""Facts to masks: which completions vote and which bear loss."""

import math

import pytest
import torch

from stream.validity import DropReason, RewardReason, RolloutReason, TruncationReason
from workers.train.algorithms.masks import (
    DROP_REASONS,
    NONE,
    REWARD_REASONS,
    ROLLOUT_REASONS,
    TRUNCATION_REASONS,
    CompletionFacts,
    derive_masks,
    drop_completions,
    only_baseline,
    reject_tokens,
    too_old_tokens,
)


def facts(rewards, groups=None, truncated=None, failed=None, dropped=None):
    """Make facts of completions; a reward of None is unmeasured, `truncated` etc. map a completion to its reason."""

    def codes(table, reasons):
        return torch.tensor(
            [table.index(reasons[c]) if c in (reasons or {}) else NONE for c in range(len(rewards))], dtype=torch.int64
        )

    ids = torch.tensor(groups or [0] * len(rewards), dtype=torch.int64)
    unmeasured = {c: RewardReason.RAISED for c, r in enumerate(rewards) if r is None}
    return CompletionFacts(
        group_ids_C=ids,
        num_groups=int(ids.max()) + 1 if len(ids) else 0,
        rewards_C=torch.tensor([0.0 if r is None else r for r in rewards]).double(),
        measured_C=torch.tensor([r is not None for r in rewards], dtype=torch.bool),
        reward_reason_C=codes(REWARD_REASONS, unmeasured),
        rollout_reason_C=codes(ROLLOUT_REASONS, failed),
        truncation_reason_C=codes(TRUNCATION_REASONS, truncated),
        drop_reason_C=codes(DROP_REASONS, dropped),
        turns_C=torch.ones(len(rewards)).long(),
    )


def one_row_each(given, policy=None, **masks):
    """Make masks where every completion has one row: one prompt token, then two sampled tokens."""
    count = len(given.rewards_C)
    sampled = torch.tensor([[False, True, True]] * count)
    truncation = {reason: policy for reason in TruncationReason if policy}
    return derive_masks(given, torch.arange(count), sampled, truncation=truncation, **masks)


def test_a_measured_completion_is_in_b_and_in_l():
    masks = one_row_each(facts([1.0]))
    assert masks.baseline_C.tolist() == masks.loss_C.tolist() == masks.loss_rows_R.tolist() == [True]
    assert masks.loss_tokens_RT.tolist() == [[False, True, True]]


@pytest.mark.parametrize(
    "bad",
    [
        {"rewards": [1.0, None]},
        {"rewards": [1.0, math.nan]},
        {"rewards": [1.0, -math.inf]},
        {"rewards": [1.0, 1.0], "failed": {1: RolloutReason.ENGINE}},
        {"rewards": [1.0, 1.0], "dropped": {1: DropReason.DIFFICULTY}},
    ],
)
def test_invalid_completions_are_in_neither_mask(bad):
    masks = one_row_each(facts(**bad))
    assert masks.baseline_C.tolist() == masks.loss_C.tolist() == [True, False]
    assert masks.rewards_C.tolist() == [1.0, 0.0]
    assert not masks.loss_tokens_RT[1].any()


@pytest.mark.parametrize(
    ("policy", "votes", "bears_loss", "reward"),
    [
        ("exclude", False, False, 0.0),
        ("keep", True, True, 5.0),
        (None, True, True, 5.0),
        ("zero_reward", False, True, 0.0),
        ("zero_reward_in_baseline", True, True, 0.0),
        ("penalty", True, True, 5.0),
        ("baseline_only", True, False, 5.0),
    ],
)
@pytest.mark.parametrize("reason", TruncationReason)
def test_truncated_completions_follow_the_policy_of_their_reason(reason, policy, votes, bears_loss, reward):
    masks = one_row_each(facts([1.0, 5.0], truncated={1: reason}), policy)
    assert masks.baseline_C.tolist() == [True, votes]
    assert masks.loss_C.tolist() == [True, bears_loss]
    assert masks.rewards_C.tolist() == [1.0, reward]
    assert masks.loss_tokens_RT.any(dim=1).tolist() == [True, bears_loss]


def test_a_policy_for_one_reason_does_not_affect_others():
    result = facts([1.0, 1.0], truncated={0: TruncationReason.LENGTH, 1: TruncationReason.CONTEXT})
    masks = derive_masks(
        result, torch.arange(2), torch.ones(2, 1).bool(), truncation={TruncationReason.CONTEXT: "exclude"}
    )
    assert masks.baseline_C.tolist() == [True, False]


@pytest.mark.parametrize("policy", ["zero_reward", "zero_reward_in_baseline"])
def test_zero_reward_does_not_make_an_unmeasured_reward_a_zero(policy):
    masks = one_row_each(facts([1.0, None], truncated={1: TruncationReason.LENGTH}), policy)
    assert masks.baseline_C.tolist() == masks.loss_C.tolist() == [True, False]


def test_a_completion_outside_b_is_rejected_dropped_and_restricted_like_one_in_b():
    cut = facts([1.0, 5.0], truncated={1: TruncationReason.LENGTH})
    masks = one_row_each(cut, "zero_reward")
    assert masks.outside_C.tolist() == [False, True]
    first = masks.loss_tokens_RT & (masks.loss_tokens_RT.cumsum(dim=1) == 1)
    less = reject_tokens(masks, torch.arange(2), {"a rule": first})
    assert (less.token_rejected_by_RT[first] == 1).all()
    assert first[1].any()
    emptied = reject_tokens(masks, torch.arange(2), {"a rule": torch.ones_like(masks.loss_tokens_RT)})
    assert not emptied.used_C.any()
    assert emptied.rejected_by_C.tolist() == [1, 1]
    assert drop_completions(masks, torch.arange(2), torch.tensor([False, True])).loss_C.tolist() == [True, False]
    alone = only_baseline(masks, torch.arange(2))
    assert alone.loss_C.tolist() == [True, False]
    assert not alone.loss_tokens_RT[1].any()


def test_an_unknown_policy_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'forgive'.*exclude, keep"):
        one_row_each(facts([1.0]), "forgive")


def test_masks_report_zeroed_and_penalized_completions():
    result = facts([1.0, 5.0, None], truncated={1: TruncationReason.LENGTH, 2: TruncationReason.LENGTH})
    assert one_row_each(result, "zero_reward_in_baseline").zeroed_C.tolist() == [False, True, False]
    assert one_row_each(result, "penalty").penalised_C.tolist() == [False, True, False]


def test_a_completion_without_remaining_tokens_is_rejected_and_not_in_b():
    rejected = torch.tensor([[False, True, True], [False, True, False]])
    masks = one_row_each(facts([3.0, 1.0]), rejected_by_rule={"too_old": rejected})
    assert masks.baseline_C.tolist() == [False, True]
    assert masks.rewards_C.tolist() == [0.0, 1.0]
    assert masks.rejected_by_C.tolist() == [masks.rules.index("too_old"), NONE]
    assert masks.loss_tokens_RT.tolist() == [[False] * 3, [False, False, True]]


def test_the_rule_that_removed_the_last_token_is_named():
    first, second = torch.tensor([[False, True, False]] * 2), torch.tensor([[False, False, True], [False, True, False]])
    masks = one_row_each(facts([1.0, 0.0]), rejected_by_rule={"too_old": first, "token_k1": second})
    assert [masks.rules[code] if code != NONE else None for code in masks.rejected_by_C.tolist()] == ["token_k1", None]


def test_an_invalid_completion_does_not_count_as_rejected():
    masks = one_row_each(facts([None, 0.0]), rejected_by_rule={"too_old": torch.ones(2, 3).bool()})
    assert masks.rejected_by_C.tolist() == [NONE, masks.rules.index("too_old")]


def test_a_completion_with_one_remaining_row_is_in_b():
    result = facts([3.0, 0.0, 1.0])
    rows = torch.tensor([0, 0, 1, 2])
    rejected = torch.tensor([[False], [True], [False], [False]])
    masks = derive_masks(result, rows, torch.ones(4, 1).bool(), truncation={}, rejected_by_rule={"a": rejected})
    assert masks.baseline_C.tolist() == [True, True, True]
    assert masks.loss_rows_R.tolist() == [True, False, True, True]
    masks = derive_masks(
        result, rows, torch.ones(4, 1).bool(), truncation={}, rejected_by_rule={"a": rejected | (rows == 0)[:, None]}
    )
    assert masks.baseline_C.tolist() == [False, True, True]


def test_a_completion_without_loss_may_have_junk_log_probs():
    unusable = torch.ones(2, 3).bool()
    result = facts([1.0, 1.0], truncated={0: TruncationReason.LENGTH})
    assert one_row_each(result, "baseline_only", not_finite_RT=unusable).baseline_C.tolist() == [True, False]


def test_a_completion_without_rows_is_counted_and_not_in_b():
    masks = derive_masks(facts([1.0, 1.0]), torch.tensor([1]), torch.ones(1, 1).bool(), truncation={})
    assert masks.baseline_C.tolist() == [False, True]


def test_an_empty_batch_has_masks():
    masks = derive_masks(facts([]), torch.empty(0).long(), torch.empty(0, 0).bool(), truncation={})
    assert masks.baseline_C.numel() == masks.loss_tokens_RT.numel() == 0


def test_tokens_are_too_old_above_the_limit_and_not_at_it():
    sampled = torch.tensor([[False, True, True, True]])
    versions = torch.tensor([[-1, 4, 5, 9]])
    assert too_old_tokens(sampled, versions, 9, 4).tolist() == [[False, True, False, False]]
    assert not too_old_tokens(sampled, versions, 9, 0).any()
