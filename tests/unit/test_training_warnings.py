"""Warnings of a run that goes wrong: each once per episode of trouble, from sequences of groups and metrics."""

from pathlib import Path

import pytest

from stream.records import Completion, Failure, Group, Prompt
from stream.validity import Measured, RewardReason, RolloutReason, TruncationReason, Unmeasured
from tests.cases.rows import sampled_row
from workers.settings.toml_file import parse_settings
from workers.train.training_warnings import _LIMITS, GROUP_RULES, INVALID_SHARE_RISES, STEP_RULES, TrainingWarnings

LEAST = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "rewards": [{"ref": "r.py:f"}]}


def warnings(**sections: dict) -> TrainingWarnings:
    return TrainingWarnings(parse_settings(LEAST | {"train": {"batch_size": 2}} | sections))


def group(*rewards: float, **fields: object) -> Group:
    completions = [Completion(index=i, reward=Measured(value), **fields) for i, value in enumerate(rewards)]
    return Group(prompt=Prompt(id="d:0:0", messages=[]), completions=completions)


def names(found: TrainingWarnings) -> list[str]:
    return [warning.name for warning in found.pop()]


def after_groups(found: TrainingWarnings, groups: list[Group]) -> list[str]:
    for each in groups:
        found.observe_group(each)
    return names(found)


def after_steps(found: TrainingWarnings, name: str, values: list[float]) -> list[str]:
    for step, value in enumerate(values):
        found.observe_step(step, {name: value})
    return names(found)


def test_constant_rewards_warn_once_until_a_group_differs():
    found = warnings()
    assert after_groups(found, [group(0.0, 0.0)] * 7) == []
    assert after_groups(found, [group(0.0, 0.0)] * 20) == ["constant_rewards"]
    assert after_groups(found, [group(0.0, 1.0)]) == []
    assert after_groups(found, [group(1.0, 1.0)] * 8) == ["constant_rewards"]


def test_constant_rewards_are_no_trouble_without_a_baseline_within_groups():
    assert after_groups(warnings(estimator={"name": "reinforce_plus_plus"}), [group(0.0, 0.0)] * 20) == []


def test_completions_that_are_all_cut_off():
    cut = {"truncated": TruncationReason.LENGTH}
    assert after_groups(warnings(), [group(0, 1, 2, 3, **cut)]) == []
    assert after_groups(warnings(), [group(0, 1, 2, 3, **cut)] * 2) == ["all_truncated"]
    assert after_groups(warnings(), [group(0, 1, 2, 3, **cut), group(0, 1, 2, 3)]) == []


@pytest.mark.parametrize(
    ("reason", "limit"),
    [
        (TruncationReason.LENGTH, "look at rollout.max_tokens_per_turn and rollout.max_tokens"),
        (TruncationReason.CONTEXT, "look at engine.max_model_len"),
        (TruncationReason.MAX_TURNS, "look at rollout.max_turns"),
        (TruncationReason.TOOL_CALLS, "look at rollout.max_tool_calls"),
        (TruncationReason.TOOL_ERRORS, "look at the tools' error messages"),
        (TruncationReason.WALL_CLOCK, "look at rollout.episode_timeout_s"),
    ],
)
def test_completions_that_are_all_cut_off_name_the_limit_that_did_it(reason, limit):
    found = warnings()
    for _ in range(2):
        found.observe_group(group(0, 1, 2, 3, truncated=reason))
    (warning,) = found.pop()
    assert f"({reason} 8)" in warning.text
    assert warning.text.endswith(limit) or f"{limit}, " in warning.text


def test_the_limit_that_cuts_off_most_is_named_first():
    found = warnings()
    found.observe_group(group(0, 1, 2, truncated=TruncationReason.LENGTH))
    found.observe_group(group(0, 1, 2, 3, 4, truncated=TruncationReason.MAX_TURNS))
    (warning,) = found.pop()
    assert "(max_turns 5, length 3)" in warning.text
    assert warning.text.endswith("rollout.max_turns; rollout.max_tokens_per_turn and rollout.max_tokens")


def test_every_reason_of_a_truncation_has_a_limit():
    assert set(_LIMITS) == set(TruncationReason)


def test_trouble_that_pauses_for_a_group_is_the_same_trouble():
    cut = [group(0, 1, 2, 3, truncated=TruncationReason.LENGTH)] * 2
    found = warnings()
    assert after_groups(found, [*cut, group(0, 1), *cut, group(0, 1), *cut]) == ["all_truncated"]
    assert after_groups(found, [*[group(0, 1)] * 8, *cut]) == ["all_truncated"]


def test_tool_errors_above_half():
    assert after_groups(warnings(), [group(0, 1, tool_calls=10, tool_errors=5)] * 8) == []
    assert after_groups(warnings(), [group(0, 1, tool_calls=10, tool_errors=6)] * 8) == ["tool_errors"]
    assert after_groups(warnings(), [group(0, 1, tool_calls=1, tool_errors=1)] * 8) == []


def begun(*prompts: list[int]) -> Group:
    found = group(*(float(i) for i in range(len(prompts))))
    for completion, prompt in zip(found.completions, prompts, strict=True):
        completion.rows = [sampled_row([5, 6], [-1.0, -1.0], prompt=prompt)] if prompt else []
    return found


def test_completions_of_a_group_that_begin_with_different_prompts_warn_once():
    found = warnings()
    same, different = begun([1, 2], [1, 2], [1, 2]), begun([1, 2], [1, 2], [1, 3])
    assert after_groups(found, [same] * 8) == []
    assert after_groups(found, [different]) == ["different_tasks"]
    assert after_groups(found, [same, different, same, different]) == []


def test_one_odd_group_and_completions_that_never_began_are_no_different_tasks():
    same, different = begun([1, 2], [1, 2]), begun([1, 2], [1, 3])
    assert after_groups(warnings(train={"batch_size": 4}), [same] * 12 + [different]) == []
    assert after_groups(warnings(), [begun([1, 2], [1, 2], []), begun([1, 2], []), begun([], [])] * 8) == []


@pytest.mark.parametrize(("estimator", "warned"), [("gae", False), ("rloo", True), ("remax", True)])
def test_different_tasks_are_trouble_where_completions_of_a_group_are_compared(estimator, warned):
    found = after_groups(warnings(estimator={"name": estimator}), [begun([1], [2])] * 8)
    assert ("different_tasks" in found) is warned


@pytest.mark.parametrize(
    ("metric", "calm", "trouble", "rule"),
    [
        ("entropy", [1.0] * 5 + [0.2] * 20, [1.0] * 5 + [0.05] * 10, "entropy_collapse"),
        ("staleness/mean", [1.9] * 10 + [9.0, 9.0, 1.0], [1.0, 2.5, 2.5, 2.5, 2.5], "too_stale"),
        ("ratio/mean", [1.0, 1.3, 1.3, 1.0], [1.0, 1.3, 1.3, 1.3], "ratio_out_of_range"),
        ("correction/k3_kl", [0.01] * 10, [0.01, 0.2, 0.2, 0.2], "ratio_out_of_range"),
        ("reference/kl", [0.01] * 5 + [0.5, 0.4] * 10, [0.01 * 1.3**i for i in range(20)], "kl_growth"),
    ],
)
def test_a_metric_out_of_range_warns_once(metric, calm, trouble, rule):
    assert after_steps(warnings(), metric, calm) == []
    assert after_steps(warnings(), metric, trouble) == [rule]


def test_missing_and_infinite_metrics_are_no_trouble():
    found = warnings()
    for step in range(20):
        found.observe_step(step, {"entropy": float("nan")} if step % 2 else {})
    assert found.pop() == []


def after_parts(served: list[float], clean: list[float]) -> list[str]:
    found = warnings()
    for step, (one, other) in enumerate(zip(served, clean, strict=True)):
        parts = {"reward/part/env.served/mean": one, "reward/part/env.clean/mean": other}
        found.observe_step(step, {"reward/mean": one + other, **parts})
    return [warning.text for warning in found.pop()]


def test_a_reward_that_rises_at_the_expense_of_one_part_names_both():
    (text,) = after_parts([0.4] * 5 + [0.1] * 10, [0.2] * 5 + [1.5] * 10)
    assert "rose from 0.6 to" in text
    assert "its part env.served fell from 0.4 to" in text
    assert "whether env.clean pays for what you want" in text


def test_a_part_that_is_not_earned_any_more_is_named_however_little_it_was():
    (text,) = after_parts([0.15] * 5 + [0.0] * 10, [0.2] * 5 + [4.0] * 10)
    assert "its part env.served fell from 0.15 to 0" in text


def test_a_part_that_no_completion_has_any_more_has_fallen_to_0():
    found = warnings()
    for step in range(15):
        served = {"reward/part/env.served/mean": 1.0} if step < 5 else {}
        found.observe_step(step, {"reward/mean": 1.0 + step, "reward/part/env.clean/mean": 0.5 + step, **served})
    (warning,) = found.pop()
    assert "its part env.served fell from 1 to 0 and env.clean rose" in warning.text


def test_a_part_that_falls_most_and_not_by_half_does_not_hide_another():
    found = warnings()
    for step in range(15):
        values = (4.0, 1.0, 0.2) if step < 5 else (3.0, 0.1, 9.0)
        parts = {f"reward/part/env.{name}/mean": value for name, value in zip("abc", values, strict=True)}
        found.observe_step(step, {"reward/mean": sum(values), **parts})
    (warning,) = found.pop()
    assert "its part env.b fell from 1 to" in warning.text


@pytest.mark.parametrize(
    ("served", "clean"),
    [
        ([0.4] * 15, [0.2] * 5 + [1.5] * 10),  # no part falls
        ([0.4] * 5 + [0.3] * 10, [0.2] * 5 + [1.5] * 10),  # by less than half
        ([0.04] * 5 + [0.01] * 10, [0.2] * 5 + [1.5] * 10),  # by little
        ([0.04, 0.0, 0.0, 0.04, 0.0] + [0.0] * 10, [0.2] * 5 + [1.5] * 10),  # by little, and rare
        ([0.4] * 5 + [0.1] * 10, [0.2] * 15),  # the reward falls, too
        ([0.4] * 5, [0.2] * 5),  # nothing to compare with
    ],
)
def test_parts_that_are_no_trouble(served, clean):
    assert after_parts(served, clean) == []


BAD = Unmeasured(RewardReason.NOT_NUMERIC)
CUT = {"truncated": TruncationReason.WALL_CLOCK}


def shares(environment: str | None, count: int, rewards: list[float], *bad: object) -> list[Group]:
    """Make groups of some rewards, and of some completions without one."""
    groups = []
    for i in range(count):
        lost = [Completion(index=8, reward=Measured(0.0), **each) if isinstance(each, dict) else each for each in bad]
        found = group(*(reward + 0.01 * (i % 3) for reward in rewards))
        found.prompt = Prompt(id=f"d:0:{i}", messages=[], environment=environment)
        found.completions += [
            each if isinstance(each, Completion) else Completion(index=9, reward=each) for each in lost
        ]
        groups.append(found)
    return groups


def after_blocks(found: TrainingWarnings, *blocks: list[Group]) -> list[str]:
    for block in blocks:
        for each in block:
            found.observe_group(each)
        found.observe_step(1, {})
    return [warning.text for warning in found.pop() if warning.name == INVALID_SHARE_RISES]


def test_completions_that_become_unmeasured_while_the_reward_rises_warn_once_and_name_the_reason():
    found = warnings()
    (text,) = after_blocks(
        *(found, shares("maths", 16, [0.2] * 8)),
        *(shares("maths", 16, [0.8] * 6, BAD, BAD) for _ in range(3)),
    )
    assert "of environment maths without a reward that counts rose from 0.0% to 25.0%" in text
    assert "rose from 0.209 to 0.809. reward:not_numeric grew most, from 0.0% to 25.0%" in text


def test_the_reason_that_grew_is_named_and_not_the_most_frequent_one():
    failed = Completion(index=9, failure=Failure(reason=RolloutReason.ENGINE))
    (text,) = after_blocks(
        *(warnings(), shares("maths", 16, [0.2] * 5, failed, failed, failed)),
        shares("maths", 16, [0.8] * 3, failed, failed, failed, CUT, BAD),
    )
    assert "truncated:wall_clock grew most, from 0.0% to 12.5%" in text or "reward:not_numeric grew most" in text
    assert "failed:engine grew" not in text


def test_environments_are_watched_one_by_one():
    found = warnings()
    calm, bad = shares("calm", 16, [0.2] * 8), shares("maths", 16, [0.8] * 6, BAD, BAD)
    texts = after_blocks(found, calm, shares("maths", 16, [0.2] * 8), shares(None, 16, [0.2] * 8), calm, bad, calm)
    assert len(texts) == 1
    (text,) = after_blocks(found, calm, bad, shares(None, 16, [0.9] * 6, CUT, CUT))
    assert "completions of the run without" in text


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (([0.2] * 8,), ([0.8] * 8,)),  # nothing is invalid
        (([0.2] * 6, BAD, BAD), ([0.8] * 6, BAD, BAD)),  # as much as before
        (([0.2] * 6, BAD, BAD), ([0.8] * 7, BAD)),  # less than before
        (([0.8] * 8,), ([0.2] * 6, BAD, BAD)),  # the reward falls, too
        (([0.2] * 8,), ([0.8] * 39, BAD)),  # a rare failure
        (([0.2] * 8,), ([0.8] * 7, {"truncated": TruncationReason.LENGTH})),  # cut off, and measured
    ],
)
def test_shares_that_are_no_trouble(before, now):
    assert after_blocks(warnings(), shares("e", 16, *before), shares("e", 16, *now)) == []


def test_invalid_completions_of_a_few_groups_are_no_trend():
    few = [*shares("e", 13, [0.8] * 8), *shares("e", 3, [0.8] * 4, BAD, BAD, BAD, BAD)]
    assert after_blocks(warnings(), shares("e", 16, [0.2] * 8), few) == []


def test_a_share_that_wavers_is_one_episode_of_trouble():
    found = warnings()
    calm, bad = shares("e", 16, [0.8] * 8), shares("e", 16, [0.8] * 6, BAD, BAD)
    assert len(after_blocks(found, shares("e", 16, [0.2] * 8), bad, calm, bad, calm, bad)) == 1
    assert after_blocks(found, *[calm] * 5) == []
    assert len(after_blocks(found, bad)) == 1


def test_every_rule_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    assert [name for name in (*GROUP_RULES, *STEP_RULES, INVALID_SHARE_RISES) if f"`{name}`" not in page] == []
