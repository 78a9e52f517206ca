"""Which groups are not worth training, and why."""

import pytest

from stream.validity import DropReason, RewardReason, TruncationReason, Unmeasured
from tests.cases.groups import completion, group
from workers.settings.toml_file import parse_settings
from workers.train.algorithms.masks import DROP_REASONS
from workers.train.step.batch import collate
from workers.train.step.group_checks import drop_groups, filter_reasons, mask_batch

LEAST = {"model": {"path": "m"}, "data": {"path": "d"}, "environments": {"a": "calculator"}}


def batch(*groups, truncated=None):
    """Make groups of completions with these rewards; `truncated` is the index of a truncated completion."""

    def one(index, reward):
        reward = Unmeasured(RewardReason.RAISED) if reward is None else reward
        return completion(index, reward, [9], truncated=TruncationReason.LENGTH if index == truncated else None)

    rewards = enumerate(groups)
    return collate([group(*(one(*each) for each in enumerate(made)), name=str(number)) for number, made in rewards])


def judge(result, policy="keep", singleton="zero", **chosen):
    algorithm = {"truncation": {"length": policy}, "single_sample_policy": singleton}
    settings = parse_settings(LEAST | {"filter": {"min_valid_rows": 1} | chosen, "algorithm": algorithm})
    return filter_reasons(result, mask_batch(result, settings, 0), settings)


def test_three_right_answers_and_a_crashed_verifier_are_a_tie():
    assert judge(batch([1.0, 1.0, 1.0, None])) == [DropReason.ZERO_VARIANCE]
    assert judge(batch([1.0, 1.0, 1.0, 0.0])) == [None]


def test_four_rewards_of_0_9_are_a_tie():
    assert judge(batch([0.9] * 4)) == [DropReason.ZERO_VARIANCE]
    assert judge(batch([0.9] * 4), zero_variance=False) == [None]


def test_filters_use_rewards_after_the_truncation_policy():
    result = batch([0.0, 1.0], truncated=1)
    assert judge(result, "zero_reward_in_baseline") == [DropReason.ZERO_VARIANCE]
    assert judge(result, "baseline_only") == [None]


def test_a_completion_at_zero_reward_is_trained_and_counts_in_no_filter():
    assert judge(batch([1.0, 0.0, 1.0], truncated=1), "zero_reward") == [DropReason.ZERO_VARIANCE]
    assert judge(batch([1.0, 0.0], truncated=1), "zero_reward", min_valid_rows=2) == [DropReason.MIN_VALID_ROWS]
    assert judge(batch([0.0], truncated=0), "zero_reward") == [DropReason.NO_VALID_ROW]


def test_a_group_without_a_valid_completion_is_dropped():
    assert judge(batch([None, None], [1.0, 0.0])) == [DropReason.NO_VALID_ROW, None]


def test_groups_below_the_minimum_are_dropped():
    result = batch([1.0, 0.0, None, None], [1.0, 0.0, 0.5])
    assert judge(result, min_valid_rows=3) == [DropReason.MIN_VALID_ROWS, None]


@pytest.mark.parametrize(("policy", "verdict"), [("zero", None), ("raw", None), ("drop", DropReason.SINGLETON)])
def test_a_single_completion_in_b_is_treated_by_single_sample_policy(policy, verdict):
    assert judge(batch([1.0, None]), singleton=policy) == [verdict]


def test_a_group_is_dropped_with_the_first_matching_reason():
    assert judge(batch([1.0, 1.0]), mean_reward_range=[2.0, 3.0]) == [DropReason.ZERO_VARIANCE]
    assert judge(batch([1.0, 1.0]), mean_reward_range=[2.0, 3.0], min_valid_rows=3) == [DropReason.MIN_VALID_ROWS]


def test_dropping_a_group_drops_its_completions_and_no_others():
    result = batch([1.0, 0.0, None], [1.0, 0.5])
    masks = mask_batch(result, parse_settings(LEAST), 0)
    left, left_masks = drop_groups(result, masks, [DropReason.DIFFICULTY, None])
    assert left_masks.baseline_C.tolist() == [False, False, False, True, True]
    assert left_masks.loss_rows_R.tolist() == [False, False, False, True, True]
    code = DROP_REASONS.index(DropReason.DIFFICULTY)
    assert left.facts.drop_reason_C.tolist() == [code, code, -1, -1, -1]  # the third has a different reason
    assert result.facts.drop_reason_C.tolist() == [-1] * 5
