"""Which groups the trainer drops before a step, and how it counts them."""

import math
from functools import partial

import pytest

from stream.errors import RecordError, RunFailedError
from stream.records import Completion, Failure, RewardPart
from stream.trainer.leased_group import DroppedGroup
from stream.validity import DropReason, Measured, RewardReason, RolloutReason, TruncationReason, Unmeasured
from tests.cases import groups
from tests.cases.groups import completion
from tests.cases.rows import sampled_row
from workers.runs.progress import Progress
from workers.settings.toml_file import parse_settings
from workers.train.groups.group_checker import GroupChecker

SETTINGS = {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": [{"ref": "r:f"}], "rollout": {"group_size": 2}}


group = partial(groups.group, name="d:0:1")
GOOD = (completion(0, Measured(1.0)), completion(1, Measured(0.0)))


@pytest.fixture
def progress():
    return Progress()


@pytest.fixture
def checker(progress):
    return GroupChecker(parse_settings(SETTINGS), 10, progress)


def test_a_group_worth_training_on_is_kept(checker, progress):
    assert not isinstance(checker.check(group(*GOOD), 0), DroppedGroup)
    assert checker.pop_dropped() == ({}, [], {})
    assert progress.completion_states == {}


def test_a_group_without_signal_is_dropped_and_its_completions_are_counted(checker, progress):
    dropped = checker.check(group(completion(0, Measured(1.0)), completion(1, Measured(1.0))), 0)
    assert (dropped.reason, [each.state for each in dropped.completions]) == (
        "zero_variance",
        ["dropped:zero_variance"] * 2,
    )
    assert progress.completion_states == {"valid": 2}
    found = checker.pop_dropped()
    assert (found.reasons, len(found.rewards)) == ({DropReason.ZERO_VARIANCE: 1}, 1)
    assert found.counters == {"rows/valid": 2}
    assert checker.pop_dropped() == ({}, [], {})


def test_completions_of_dropped_groups_are_counted_by_state_however_many_groups_there_are(progress):
    checker = checker_of(progress, abort={"max_invalid_fraction": 1.0})
    missing, cut = completion(0, Unmeasured(RewardReason.MISSING)), completion(1, Measured(1.0))
    cut.truncated = TruncationReason.LENGTH
    for _ in range(9):
        checker.check(group(missing, cut), 0)
    found = checker.pop_dropped()
    assert found.counters == {"rows/reward:missing": 9, "rows/valid": 9, "truncated/length": 9}
    assert len(found.rewards) < 9


def test_an_unmeasured_reward_is_not_a_number(checker, progress):
    timeout = completion(1, Unmeasured(RewardReason.TIMEOUT))
    dropped = checker.check(group(completion(0, Measured(1.0)), timeout), 0)
    assert dropped.reason == "min_valid_rows"
    assert [(each.state, each.advantage, each.loss_tokens) for each in dropped.completions] == [
        ("dropped:min_valid_rows", None, 0),
        ("reward:timeout", None, 0),
    ]
    assert progress.completion_states == {"valid": 1, "reward:timeout": 1}


@pytest.mark.parametrize(
    ("reward", "part"),
    [
        (1e19, None),
        (-1.7e308, None),
        (1.0, RewardPart(name="a", reward=Measured(1e19), weight=0.0)),
        (1.0, RewardPart(name="a", reward=Measured(1.0), weight=1e30)),
    ],
)
def test_a_huge_reward_of_a_foreign_scorer_makes_its_own_completion_invalid_and_leaves_its_siblings_readable(
    checker, progress, reward, part
):
    huge = completion(2, Measured(reward))
    huge.parts = [part] if part else []
    checked = checker.check(group(*GOOD, huge), 0)
    assert not isinstance(checked, DroppedGroup)
    assert checked.states == ["valid", "valid", "reward:too_large"]
    assert checked.rewards.rewards_C[checked.rewards.baseline_C].tolist() == [1.0, 0.0]


def test_a_huge_reward_part_of_an_invalid_completion_is_ignored(checker):
    failed = completion(2, Unmeasured(RewardReason.RAISED))
    failed.parts = [RewardPart(name="env", reward=Measured(1e300))]
    assert not isinstance(checker.check(group(*GOOD, failed), 0), DroppedGroup)


def test_a_token_outside_the_vocabulary_makes_the_group_unreadable(checker):
    with pytest.raises(RecordError, match="vocabulary"):
        checker.check(group(completion(0, Measured(1.0), [10, 4]), completion(1, Measured(0.0))), 0)


def checker_of(progress, **sections):
    """Look at the last four groups."""
    return GroupChecker(parse_settings(SETTINGS | {"train": {"batch_size": 1}} | sections), 10, progress)


def without_loss(kind):
    """Make a completion that bears no loss."""
    bad = completion(1, Measured(1.0))
    if kind == "reward:timeout":
        bad.reward = Unmeasured(RewardReason.TIMEOUT)
    elif kind == "failed:engine":
        bad.failure = Failure(reason=RolloutReason.ENGINE)
    elif kind.startswith("truncated:"):
        bad.truncated = TruncationReason(kind.removeprefix("truncated:"))
    elif kind == "rejected:no_token":
        bad.rows = []
    elif kind == "rejected:not_finite":
        bad.rows = [sampled_row([3, 4], [math.nan, math.nan])]
    return bad


SILENT = {"algorithm": {"truncation": {"max_turns": "baseline_only"}}}


@pytest.mark.parametrize(
    ("kind", "sections"),
    [
        ("reward:timeout", {}),
        ("failed:engine", {}),
        ("truncated:wall_clock", {}),
        ("truncated:length", {"algorithm": {"truncation": {"length": "exclude"}}}),
        ("truncated:max_turns", SILENT),
        ("rejected:no_token", {}),
        ("rejected:not_finite", {}),
    ],
)
@pytest.mark.parametrize("number", [1, 2])
def test_too_many_completions_without_loss_end_the_run_whatever_the_reason(kind, sections, number, progress):
    """Half of each group, or all of it; groups are counted when they are dropped, or after their step."""
    checker = checker_of(progress, abort={"max_invalid_fraction": 0.4}, **sections)
    bad = group(*[completion(0, Measured(0.0))][: 2 - number], *[without_loss(kind)] * number)

    def go_on() -> None:
        for _ in range(4):
            checked = checker.check(bad, 0)
            if not isinstance(checked, DroppedGroup):
                checker.observe_step([bad], {bad.prompt.id: checked.without_loss})

    with pytest.raises(
        RunFailedError, match=rf"{4 * number} of the last 8 completions .* {kind}.*max_invalid_fraction"
    ):
        go_on()


def test_tokens_that_are_too_old_count_as_completions_without_loss(progress):
    checker = checker_of(progress, pacing={"max_token_age": 2})
    for _ in range(3):
        dropped = checker.check(group(*GOOD), 9)
        assert {each.state for each in dropped.completions} == {"rejected:too_old"}
    with pytest.raises(RunFailedError, match=r"8 of the last 8 .* rejected:too_old"):
        checker.check(group(*GOOD), 9)


def test_what_a_step_rejected_counts_and_valid_siblings_do_not(progress):
    checker = checker_of(progress)
    for _ in range(9):
        checker.observe_step([group(*GOOD)], {})
    checker.observe_step([group(*GOOD)], {"d:0:1": {"rejected:seq_mean_k1": 1}})
    with pytest.raises(RunFailedError, match=r"2 of the last 8 .* rejected:seq_mean_k1"):
        checker.observe_step([group(*GOOD)], {"d:0:1": {"rejected:seq_mean_k1": 1}})


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"reward": Unmeasured(RewardReason.TIMEOUT)}, "reward:timeout"),
        ({"failure": Failure(reason=RolloutReason.ENGINE)}, "failed:engine"),
        ({"truncated": TruncationReason.WALL_CLOCK}, "truncated:wall_clock"),
        ({}, ""),
    ],
)
def test_a_greedy_completion_counts_if_it_can_be_no_baseline(facts, reason, progress):
    greedy = Completion(**{"index": 2, "greedy": True, "reward": Measured(1.0)} | facts)
    checker = checker_of(progress, estimator={"name": "remax"})

    def go_on() -> None:
        for _ in range(4):
            checker.observe_step([group(*GOOD, greedy)], {})

    if not reason:
        go_on()
        return
    with pytest.raises(RunFailedError, match=f"4 of the last 12 .* {reason}"):
        go_on()
