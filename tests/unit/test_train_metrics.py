"""A step's metrics: which completions each covers, its divisor, and what it excludes."""

import pytest

from stream.records import Completion, Failure, RewardPart
from stream.validity import DropReason, Measured, RewardReason, RolloutReason, TruncationReason, Unmeasured
from tests.cases import groups
from tests.cases.groups import group
from workers import settings
from workers.settings.toml_file import parse_settings
from workers.train.algorithms.advantages import dr_grpo
from workers.train.algorithms.grouping import Grouping
from workers.train.step.batch import collate
from workers.train.step.group_checks import check_group, count_states, mask_batch
from workers.train.step.step_metrics import omit_constants, step_metrics

SETTINGS = settings.Settings(
    model=settings.ModelSettings(path="none"),
    data=settings.DataSettings(path="none"),
    algorithm=settings.AlgorithmSettings(truncation={TruncationReason.LENGTH: "exclude"}),
    filter=settings.FilterSettings(min_valid_rows=2),
)


def completion(index, length, reward, version=5, **facts):
    return groups.completion(index, reward, [1] * length, version=version, **facts)


def metrics(*made, version=7, **more):
    batch = collate(made)
    masks = mask_batch(batch, SETTINGS, version)
    advantages = dr_grpo(masks.rewards_C, Grouping(batch.facts.group_ids_C, masks.baseline_C, batch.facts.num_groups))
    return step_metrics(batch, masks, advantages, settings=SETTINGS, version=version, **more)


VOCABULARY = 1_000_000
VALID = (
    completion(0, 2, Measured(1.0), turns=1),
    completion(1, 4, Measured(0.0), version=7, turns=3),
    completion(2, 3, Measured(5.0), truncated=TruncationReason.CONTEXT, turns=5),
)
INVALID = (
    completion(3, 90, Unmeasured(RewardReason.TIMEOUT), turns=90),
    completion(4, 90, Measured(1e6), failure=Failure(reason=RolloutReason.ENGINE), turns=90),
    completion(5, 90, Measured(1e6), truncated=TruncationReason.LENGTH, turns=90, version=0),
    Completion(index=6, failure=Failure(reason=RolloutReason.ENV_RESET)),
)


def test_rewards_lengths_turns_and_ages_are_those_of_valid_completions():
    result = metrics(group(*VALID, *INVALID))
    expected = {
        "reward/mean": 2.0,
        "reward/std": 7**0.5,
        "reward/min": 0.0,
        "reward/max": 5.0,
        "reward/count": 3,
        "advantage/mean": 0.0,
        "advantage/min": -2.0,
        "advantage/max": 3.0,
        "length/mean": 3.0,
        "length/max": 4,
        "turns/mean": 3.0,
        "tokens/loss": 9,
        "tokens/sampled": 9 + 270,
        "staleness/mean": 10 / 9,
        "staleness/max": 2,
        "valid_fraction": 3 / 7,
    }
    assert {name: result[name] for name in expected} == pytest.approx(expected)


def test_every_completion_is_counted_once_under_its_state():
    result = metrics(group(*VALID, *INVALID))
    assert {name: value for name, value in result.items() if name.startswith("rows/")} == {
        "rows/valid": 3,
        "rows/reward:timeout": 1,
        "rows/failed:engine": 1,
        "rows/truncated:length": 1,
        "rows/failed:env_reset": 1,
    }


def test_truncated_completions_are_counted_by_reason():
    result = metrics(group(*VALID, *INVALID))
    assert (result["truncated/context"], result["truncated/length"]) == (1, 1)
    assert (result["truncated/reward_mean"], result["truncated/length_mean"]) == (5.0, 3.0)


def test_an_empty_mean_is_omitted():
    result = metrics(group(*INVALID))
    assert result["reward/count"] == result["trained/reward_count"] == result["tokens/loss"] == 0
    absent = ("reward/", "advantage/", "length/", "turns/", "staleness/", "truncated/reward")
    assert [name for name in result if name.startswith(absent)] == ["reward/count"]


def test_sampled_rewards_include_filtered_groups():
    tie = group(*[completion(i, 2, Measured(1.0)) for i in range(3)], *INVALID, name="q")
    checked = check_group(tie, SETTINGS, 7, VOCABULARY)
    result = metrics(group(*VALID), filtered=[checked.rewards], dropped={checked.drop_reason: 1})
    assert (result["reward/mean"], result["reward/count"]) == (1.5, 6)
    assert (result["reward/min"], result["reward/max"]) == (0.0, 5.0)
    assert (result["trained/reward_mean"], result["trained/reward_count"]) == (2.0, 3)
    assert (result["groups/kept"], result["groups/dropped/zero_variance"]) == (1, 1)


def test_reward_parts_are_averaged_over_completions_that_have_them():
    """Two environments in one batch, and a filtered group."""

    def scored(index, name, value):
        return completion(index, 2, Measured(value), parts=[RewardPart(name=name, reward=Measured(value))])

    chess = group(scored(0, "chess", 9.5), scored(1, "chess", 10.0), name="chess")
    maths = group(scored(0, "maths", 0.0), scored(1, "maths", 1.0), name="maths")
    tie = check_group(group(*[scored(i, "maths", 1.0) for i in range(2)], name="tie"), SETTINGS, 7, VOCABULARY)
    result = metrics(chess, maths, filtered=[tie.rewards])
    assert (result["reward/part/chess/mean"], result["reward/part/chess/min"]) == (9.75, 9.5)
    assert (result["reward/part/maths/mean"], result["reward/part/maths/max"]) == (0.75, 1.0)


@pytest.mark.parametrize(
    ("sections", "shown"),
    [
        ({}, False),
        ({"train": {"updates_per_batch": 2}}, True),
        ({"algorithm": {"proximal": "engine"}, "correction": {"weights": "none"}}, True),
        ({"algorithm": {"proximal": "interpolate"}}, True),
    ],
)
def test_ratio_metrics_are_omitted_where_they_cannot_move(sections, shown):
    figures = {"loss": 0.5, "ratio/mean": 1.0, "ratio/max": 1.0, "kl/k1": 0.0, "kl/abs": 0.0, "clip_fraction": 0.0}
    chosen = parse_settings({"model": {"path": "m"}, "data": {"path": "d"}, "rewards": [{"ref": "r:f"}]} | sections)
    assert omit_constants(figures, chosen) == (figures if shown else {"loss": 0.5})


def test_groups_without_signal_are_counted():
    tie = group(*[completion(i, 2, Measured(1.0)) for i in range(2)], name="tie")
    single = group(completion(0, 2, Measured(1.0)), *INVALID, name="single")
    result = metrics(group(*VALID), tie, single)
    assert (result["groups/kept"], result["groups/tie"], result["groups/singleton"]) == (3, 1, 1)


def test_a_completion_with_several_rows_counts_once():
    two = completion(0, 2, Measured(1.0))
    two.rows.append(completion(0, 3, None).rows[0])
    result = metrics(group(two, VALID[1]))
    assert (result["reward/count"], result["length/mean"], result["length/max"]) == (2, 4.5, 5)


def test_an_unscored_completion_is_missing_its_reward():
    batch = collate([group(completion(0, 2, None))])
    assert count_states(batch.facts, mask_batch(batch, SETTINGS, 7)) == {"reward:missing": 1}


def test_check_group_uses_the_same_masks():
    assert check_group(group(*VALID, *INVALID), SETTINGS, 7, VOCABULARY).drop_reason is None
    checked = check_group(group(*INVALID), SETTINGS, 7, VOCABULARY)
    assert checked.drop_reason is DropReason.NO_VALID_ROW
    assert sorted(checked.states) == ["failed:engine", "failed:env_reset", "reward:timeout", "truncated:length"]
    assert check_group(group(VALID[0]), SETTINGS, 7, VOCABULARY).drop_reason is DropReason.MIN_VALID_ROWS
    assert check_group(group(VALID[0], VALID[0]), SETTINGS, 7, VOCABULARY).drop_reason is DropReason.ZERO_VARIANCE


def test_metrics_are_plain_numbers():
    assert {type(value) for value in metrics(group(*VALID, *INVALID)).values()} == {int, float}
