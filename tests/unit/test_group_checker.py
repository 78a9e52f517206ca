"""Which groups the trainer drops before a step, and how it counts them."""

import pytest

from stream.errors import RecordError, RunFailedError
from stream.records import Completion, Group, Prompt, RewardPart
from stream.trainer.outcomes import Dropped
from stream.validity import DropReason, Measured, RewardReason, Unmeasured
from tests.cases.rows import sampled_row
from workers.settings.toml_file import parse_settings
from workers.train.groups.group_checker import GroupChecker
from workers.train.progress import Progress

SETTINGS = {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": [{"ref": "r:f"}], "rollout": {"group_size": 2}}


def completion(i, reward, token=3):
    return Completion(index=i, rows=[sampled_row([token, 4], [-0.5, -0.5])], reward=reward)


def group(*completions):
    return Group(prompt=Prompt(id="d:0:1", messages=[]), completions=list(completions))


GOOD = (completion(0, Measured(1.0)), completion(1, Measured(0.0)))


@pytest.fixture
def progress():
    return Progress()


@pytest.fixture
def checker(progress):
    return GroupChecker(parse_settings(SETTINGS), 10, progress)


def test_a_group_worth_training_on_is_kept(checker, progress):
    assert not isinstance(checker.check(group(*GOOD), 0), Dropped)
    assert checker.pop_dropped() == ({}, [])
    assert progress.completion_states == {}


def test_a_group_without_signal_is_dropped_and_its_completions_are_counted(checker, progress):
    dropped = checker.check(group(completion(0, Measured(1.0)), completion(1, Measured(1.0))), 0)
    assert dropped == Dropped("zero_variance")
    assert progress.completion_states == {"valid": 2}
    counts, filtered = checker.pop_dropped()
    assert (counts, len(filtered)) == ({DropReason.ZERO_VARIANCE: 1}, 1)
    assert checker.pop_dropped() == ({}, [])


def test_an_unmeasured_reward_is_not_a_number(checker, progress):
    timeout = completion(1, Unmeasured(RewardReason.TIMEOUT))
    assert checker.check(group(completion(0, Measured(1.0)), timeout), 0) == Dropped("min_valid_rows")
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
    assert not isinstance(checked, Dropped)
    assert checked.states == {"valid": 2, "reward:too_large": 1}
    assert checked.rewards.rewards_C[checked.rewards.baseline_C].tolist() == [1.0, 0.0]


def test_a_huge_reward_part_of_an_invalid_completion_is_ignored(checker):
    failed = completion(2, Unmeasured(RewardReason.RAISED))
    failed.parts = [RewardPart(name="env", reward=Measured(1e300))]
    assert not isinstance(checker.check(group(*GOOD, failed), 0), Dropped)


def test_a_token_outside_the_vocabulary_makes_the_group_unreadable(checker):
    with pytest.raises(RecordError, match="vocabulary"):
        checker.check(group(completion(0, Measured(1.0), token=10), completion(1, Measured(0.0))), 0)


def test_too_many_invalid_completions_end_the_run(progress):
    abort = {"max_invalid_fraction": 0.4}
    checker = GroupChecker(parse_settings(SETTINGS | {"abort": abort, "train": {"batch_size": 1}}), 10, progress)
    unmeasured = completion(1, Unmeasured(RewardReason.TIMEOUT))

    def check_many() -> None:
        for _ in range(1000):
            checker.check(group(completion(0, Measured(1.0)), unmeasured), 0)

    with pytest.raises(RunFailedError, match="max_invalid_fraction"):
        check_many()
