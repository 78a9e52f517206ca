"""Rewards prepared for an estimator: per turn, shaped, with length penalty, against a greedy rollout, truncated."""

import math

import pytest
import torch

from stream.records import RewardPart
from stream.validity import DropReason, Measured, RewardReason, TruncationReason, Unmeasured
from tests.cases import groups
from workers.settings.toml_file import parse_settings
from workers.train.step.batch import ForwardStatistics, collate
from workers.train.step.estimation import estimate_advantages
from workers.train.step.group_checks import filter_reasons, mask_batch

LEAST = {"model": {"path": "m"}, "data": {"path": "d"}, "environments": {"a": "calculator"}}


def completion(index, reward, *, turns=(2,), by_turn=None, **facts):
    """Make turns with these numbers of sampled tokens; one tool token follows each turn but the last."""
    tokens = [token for length in turns for token in (*[2] * length, 0)][:-1]
    parts = [RewardPart(name="env", reward=Measured(value), turn=turn) for turn, value in enumerate(by_turn or ())]
    return groups.completion(index, reward, tokens, parts=parts, **facts)


def estimate(completions, **sections):
    settings = parse_settings(LEAST | {"filter": {"min_valid_rows": 1}} | sections)
    batch = collate([groups.group(*completions)])
    masks = mask_batch(batch, settings, 0)
    return estimate_advantages(batch, masks, settings), filter_reasons(batch, masks, settings)


def values(completions, **sections):
    return estimate(completions, **sections)[0].values_C.tolist()


REWARD_TO_GO = {"estimator": {"name": "reinforce_plus_plus", "whiten": False}}


def test_turn_rewards_are_on_the_turns_last_tokens_and_the_rest_on_the_very_last():
    by_turn = completion(0, 1.75, turns=(2, 1, 2), by_turn=(0.5, 0.0, 0.25))  # 1.0 from another part
    result, _ = estimate([by_turn, completion(1, 0.0)], **REWARD_TO_GO)
    assert result.tokens_RT[0].tolist() == [0, 0, 1.75, 1.75, 0, 1.25, 0, 1.25, 1.25]
    assert result.returns_RT[0].tolist() == result.tokens_RT[0].tolist()


def test_a_zeroed_reward_is_zero_on_every_turn():
    cut = completion(0, 0.75, turns=(1, 1), by_turn=(0.5, 0.25), truncated=TruncationReason.LENGTH)
    algorithm = {"truncation": {"length": "zero_reward_in_baseline"}}
    result, _ = estimate([cut, completion(1, 1.0)], algorithm=algorithm, **REWARD_TO_GO)
    assert result.tokens_RT[0].tolist() == [0, 0, 0, 0, 0]


TURNS = {"turns": (1, 1), "by_turn": (100.0, 100.0)}
"""Two turns that earned 100 each."""


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "gae", "optimal_token_baseline", "tir_optimal_token_baseline"])
def test_turn_rewards_are_normalized_like_their_sum(name):
    """The return at the first token is the normalized reward; later returns have the same unit."""
    rewarded = [completion(0, 200.0, **TURNS), completion(1, 0.0), completion(2, 100.0)]
    returns = returns_of(rewarded, name, algorithm={"reward_normalization": ["group", "group"]})
    assert returns[0] == pytest.approx([1.0, 0.0], abs=1e-6)  # mean 100, standard deviation 100
    assert returns[1] == pytest.approx([-1.0, -1.0], abs=1e-6)


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "gae", "remax", "optimal_token_baseline"])
def test_turn_rewards_are_clipped_like_their_sum(name):
    """No return exceeds the limit, and the first one equals that of a completion without turns and the same reward."""
    rewarded = [completion(0, 200.0, **TURNS), completion(1, 200.0), completion(2, 0.0, greedy=True)]
    assert returns_of(rewarded, name, algorithm={"reward_clip": 120.0})[:2] == [[120.0, 100.0], [120.0, 120.0]]
    losing = [completion(0, 1.0, turns=(1, 1), by_turn=(1000.0, -999.0)), completion(1, 2.0), rewarded[2]]
    assert returns_of(losing, name, algorithm={"reward_clip": 20.0})[0] == [1.0, -20.0]


def test_equal_rewards_divided_by_their_deviation_give_zero_returns_on_every_turn():
    same = [completion(0, 2.0, turns=(1, 1), by_turn=(2.0, 0.0)), completion(1, 2.0, turns=(1, 1), by_turn=(0.0, 2.0))]
    algorithm = {"reward_normalization": ["batch", "batch"]}
    assert returns_of(same, "reinforce_plus_plus", algorithm=algorithm) == [[0.0, 0.0]] * 2


def returns_of(completions, name, **sections):
    """Return to go of each sampled token, by completion."""
    chosen = {"name": name} | ({"whiten": False, "gae_lambda": 1.0} if name == "gae" else {})
    chosen |= {"whiten": False} if name == "reinforce_plus_plus" else {}
    settings = parse_settings(LEAST | {"filter": {"min_valid_rows": 1}, "estimator": chosen} | sections)
    batch = collate([groups.group(*completions)])
    masks = mask_batch(batch, settings, 0)
    zeros_RT = torch.zeros(batch.tokens_RT.shape, dtype=torch.float64)
    statistics = ForwardStatistics(
        old_logprobs_RT=zeros_RT - 1.0,
        sum_pi_squared_RT=zeros_RT + 0.5,
        values_RT=zeros_RT,
        end_values_R=zeros_RT.sum(dim=1),
    )
    returns_RT = estimate_advantages(batch, masks, settings, statistics=statistics).returns_RT
    return [line[sampled].tolist() for line, sampled in zip(returns_RT, batch.sampled_RT, strict=True)]


def test_shaping_applies_the_overlong_penalty_before_the_clip():
    shaping = {"overlong_penalty": [2, 0.5], "reward_clip": 0.875}
    rollout = {"max_tokens": 4, "max_tokens_per_turn": 4}
    long, longer, short = completion(0, 1.0, turns=(3,)), completion(1, 1.0, turns=(4,)), completion(2, 1.0)
    # 1 - .25 = .75, 1 - .5 = .5, 1; clipped
    result = values([long, longer, short], algorithm=shaping, rollout=rollout, estimator={"name": "dr_grpo"})
    assert result == pytest.approx([0.75 - 2.125 / 3, 0.5 - 2.125 / 3, 0.875 - 2.125 / 3])


def test_under_the_policy_penalty_a_truncated_completion_gets_the_full_penalty():
    sections = {
        "algorithm": {"truncation": {"max_turns": "penalty"}, "overlong_penalty": [2, 0.5]},
        "rollout": {"max_tokens": 100, "max_tokens_per_turn": 100},
        "estimator": {"name": "dr_grpo"},
    }
    cut = completion(0, 1.0, truncated=TruncationReason.MAX_TURNS)
    assert values([cut, completion(1, 1.0)], **sections) == [-0.25, 0.25]


def test_the_greedy_completion_is_the_baseline_and_in_no_statistic():
    rolled = [completion(0, 1.0), completion(1, 0.0), completion(2, 0.5, greedy=True)]
    result, verdict = estimate(rolled, estimator={"name": "remax"})
    assert result.values_C.tolist() == [0.5, -0.5]
    assert verdict == [None]


@pytest.mark.parametrize(
    ("reward", "facts", "policy", "expected"),
    [
        (Unmeasured(RewardReason.RAISED), {}, "keep", None),
        (0.5, {"truncated": TruncationReason.LENGTH}, "keep", [0.5, -0.5]),
        (0.5, {"truncated": TruncationReason.LENGTH}, "zero_reward_in_baseline", [1.0, 0.0]),
        (0.5, {"truncated": TruncationReason.LENGTH}, "exclude", None),
    ],
)
def test_a_greedy_completion_follows_the_same_rules_as_the_others(reward, facts, policy, expected):
    rolled = [completion(0, 1.0), completion(1, 0.0), completion(2, reward, greedy=True, **facts)]
    algorithm = {"truncation": {"length": policy}}
    result, verdict = estimate(rolled, estimator={"name": "remax"}, algorithm=algorithm)
    if expected is None:
        assert verdict == [DropReason.NO_BASELINE]
    else:
        assert result.values_C.tolist() == expected


def test_the_greedy_reward_is_shaped_like_the_others():
    rolled = [completion(0, 1.0), completion(1, 0.0), completion(2, 0.75, greedy=True)]
    assert values(rolled, estimator={"name": "remax"}, algorithm={"reward_clip": 0.5}) == [0.0, -0.5]


@pytest.mark.parametrize("cut", [{}, {"truncated": TruncationReason.MAX_TURNS}])
def test_the_greedy_completion_pays_the_same_overlong_penalty(cut):
    """Identical completions have no advantage; a shorter greedy completion pays no penalty."""
    sections = {
        "algorithm": {"truncation": {"max_turns": "penalty"}, "overlong_penalty": [2, 1.0]},
        "rollout": {"max_tokens": 4, "max_tokens_per_turn": 4},
        "estimator": {"name": "remax"},
    }
    long = [completion(i, 0.5, turns=(4,), greedy=i == 2, **cut) for i in range(3)]
    assert values(long, **sections) == [0.0, 0.0]
    assert values([*long[:2], completion(2, 0.5, turns=(1,), greedy=True)], **sections) == [-1.0, -1.0]


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({"mean_reward_range": [0.4, 1.0]}, DropReason.DIFFICULTY),
        ({"mean_reward_range": [0.0, 0.3]}, DropReason.DIFFICULTY),
        ({"mean_reward_range": [0.25, 0.4]}, None),
        ({"advantage_range": [0.7, math.inf]}, DropReason.ADVANTAGE),
        ({"advantage_range": [0.0, 0.6]}, DropReason.ADVANTAGE),
        ({"advantage_range": [0.6, 0.7]}, None),
    ],
)
def test_groups_out_of_bounds_are_dropped_by_reason(bounds, expected):
    rolled = [completion(0, 1.0), completion(1, 0.0), completion(2, 0.0)]
    _, verdict = estimate(rolled, filter={"min_valid_rows": 1, **bounds}, estimator={"name": "dr_grpo"})
    assert verdict == [expected]


def test_a_baseline_only_completion_counts_in_its_group_and_not_in_the_batch():
    silent = completion(2, 4.0, truncated=TruncationReason.LENGTH)
    rolled = [completion(0, 1.0), completion(1, 0.0), silent]
    algorithm = {"truncation": {"length": "baseline_only"}}
    of_group = {"algorithm": algorithm | {"reward_normalization": ["group", "none"]}}
    group = values(rolled, **of_group, estimator={"name": "dr_grpo"})
    assert group[:2] == pytest.approx([1 - 5 / 3, -5 / 3])
    of_batch = {"algorithm": algorithm | {"reward_normalization": ["batch", "batch"]}}
    result = values(rolled, **of_batch, **REWARD_TO_GO)
    assert result[:2] == pytest.approx([0.5**0.5, -(0.5**0.5)], rel=1e-4)


CUT = {"truncated": TruncationReason.LENGTH}
ZERO = {"truncation": {"length": "zero_reward"}}


def with_cut(*rewards, **sections):
    """Estimate for completions of these rewards and one that was cut off, whose measured reward is 8."""
    rolled = [*(completion(i, reward) for i, reward in enumerate(rewards)), completion(9, 8.0, **CUT)]
    algorithm = ZERO | sections.pop("algorithm", {})
    result, _ = estimate(rolled, algorithm=algorithm, **sections)
    return result


STD = math.sqrt(1 / 3)  # of 1, 0, 0, 1


@pytest.mark.parametrize(
    ("estimator", "algorithm", "expected"),
    [
        ({"name": "dr_grpo"}, {}, -0.5),
        ({"name": "rloo"}, {}, -0.5 * 4 / 3),
        ({"name": "grpo", "epsilon": 0.1}, {}, -0.5 / (STD + 0.1)),
        ({"name": "grpo", "normalize_std": False, "leave_one_out": True}, {}, -0.5 * 4 / 3),
        ({"name": "opo"}, {}, -0.5),
        ({"name": "max_rl", "epsilon": 0.1}, {}, -0.5 / 0.6),
        ({"name": "gpg"}, {}, -0.5 * 2),
        ({"name": "dr_grpo"}, {"reward_normalization": ["group", "group"]}, -0.5 / STD),
        ({"name": "dr_grpo"}, {"advantage_normalization": ["batch", "batch"]}, -0.5 / math.sqrt(0.25 * 8 / 7)),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_zero_reward_trains_at_what_0_is_worth_among_the_others_and_changes_nothing_for_them(
    estimator, algorithm, expected
):
    rewards = (1.0, 0.0, 0.0, 1.0)
    result = with_cut(*rewards, estimator=estimator, algorithm=algorithm)
    alone = values([completion(i, r) for i, r in enumerate(rewards)], estimator=estimator, algorithm=algorithm)
    assert result.values_C.tolist()[:4] == alone, "the siblings' advantages are the same, bit for bit"
    assert result.values_C[4].item() == pytest.approx(expected, rel=1e-3 if algorithm else 1e-9)
    assert result.tokens_RT[4, -1].item() == pytest.approx(result.values_C[4].item())
    assert result.values_C[4] == pytest.approx(result.values_C[1].item(), rel=1e-3), "a 0 in B has the same advantage"


def test_a_whitened_advantage_at_zero_reward_is_in_the_unit_of_the_others():
    result = with_cut(1.0, 0.0, 0.0, 1.0, estimator={"name": "reinforce_plus_plus_baseline"})
    assert result.values_C[4] == result.values_C[1]


@pytest.mark.parametrize("rewards", [(1.0, 1.0, 1.0), (1.0,), ()])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "gpg"])
def test_zero_reward_has_no_advantage_where_nothing_tells_what_a_reward_is_worth(rewards, name):
    assert with_cut(*rewards, estimator={"name": name}).values_C[-1] == 0


def test_zero_reward_far_from_rewards_that_hardly_differ_is_bounded_in_standard_deviations():
    rewards = (1.0, 1.0, 1.0, 0.999)
    assert with_cut(*rewards, estimator={"name": "dr_grpo"}).values_C[-1] == pytest.approx(-0.99975)
    bounded = with_cut(*rewards, estimator={"name": "grpo", "epsilon": 1e-12}).values_C[-1]
    assert bounded == pytest.approx(-4 / math.sqrt(5))


def test_token_advantages_are_a_view_of_completion_advantages():
    result, _ = estimate([completion(0, 1.0), completion(1, 0.0, turns=(5,))])
    assert result.tokens_RT.stride() == (1, 0)
    assert torch.equal(result.tokens_RT[:, 0], result.values_C)
