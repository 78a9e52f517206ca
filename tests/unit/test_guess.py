"""The number-guessing environment, whose state the calls change."""

import pytest

from envs.builtin.guess import Guess
from envs.contract import Environment, EnvironmentFailure
from envs.factory import EnvironmentFactory
from envs.snapshot import freeze, thaw


def test_an_episode_is_played_to_its_end():
    env = Guess()
    assert isinstance(env, Environment)
    assert "from 1 to 10" in env.reset(secret=7, high=10)
    assert [env.guess(5), env.guess(9), env.guess(7)] == ["higher", "lower", "correct"]
    assert env.get_reward() == 1.0


def test_without_the_right_number_the_reward_is_0():
    env = Guess()
    env.reset(secret=7)
    env.guess(8)
    assert env.get_reward() == 0.0


def test_a_missing_secret_is_drawn_from_the_seed():
    secrets = []
    for seed in (1, 1, 2, 3):
        env = Guess()
        env.reset(seed=seed, low=1, high=10**6)
        secrets.append(env.secret)
    assert secrets[0] == secrets[1]
    assert len(set(secrets)) == 3


@pytest.mark.parametrize("row", [{"secret": 101}, {"low": 5, "high": 4}, {"secret": 3, "low": 5, "high": 4}])
def test_an_invalid_row_makes_the_completion_invalid(row):
    with pytest.raises(EnvironmentFailure, match="is not between"):
        Guess().reset(**row)


def test_the_next_episode_does_not_change_the_last_snapshot():
    env = Guess()
    env.reset(secret=7)
    env.guess(7)
    data = freeze(env, 10_000)
    env.guesses.clear()
    env.reset(secret=1)
    back = thaw(data, EnvironmentFactory.load("guess"))
    assert (back.guesses, back.get_reward()) == ([7], 1.0)
