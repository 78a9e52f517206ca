"""Shaping: expected values, and invalid rewards that stay invalid."""

import math

import pytest
import torch

from workers.train.algorithms.shaping import (
    REWARD_SHAPINGS,
    clip_rewards,
    overlong_penalty,
    shape_overlong,
)

OPTIONS = {"limit": 20.0, "max_length": 100, "tail": 20, "factor": 0.5}


def inputs(rewards: list[float], valid: list[bool]) -> dict[str, torch.Tensor]:
    return {
        "rewards_C": torch.tensor(rewards, dtype=torch.float64),
        "baseline_C": torch.tensor(valid, dtype=torch.bool),
        "lengths_C": torch.full((len(rewards),), 90),
        "penalised_C": torch.zeros(len(rewards), dtype=torch.bool),
    }


def shape(name: str, rewards: list[float], valid: list[bool]) -> list[float]:
    options = {key: OPTIONS[key] for key in REWARD_SHAPINGS[name].option_names}
    return REWARD_SHAPINGS[name](inputs(rewards, valid), options).tolist()


def test_clipping_is_symmetric_and_infinity_disables_it():
    rewards, valid = torch.tensor([-3.0, 0.25, 3.0]), torch.ones(3, dtype=torch.bool)
    assert clip_rewards(rewards, valid, limit=1.0).tolist() == [-1.0, 0.25, 1.0]
    assert clip_rewards(rewards, valid, limit=math.inf).tolist() == rewards.tolist()


def test_an_infinite_reward_is_not_clipped_into_a_number():
    """AReaL clips before it tests for finiteness: [1, inf] trains as [1, 20]."""
    assert shape("clipped", [1.0, math.inf], [True, False]) == [1.0, 0.0]


@pytest.mark.parametrize("name", REWARD_SHAPINGS)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_a_value_within_the_mask_that_is_not_finite_is_an_error(name, junk):
    with pytest.raises(ValueError, match="not finite"):
        shape(name, [1.0, junk], [True, True])


def test_a_reward_that_does_not_stay_finite_is_an_error():
    lowest, valid = torch.tensor([-1e308], dtype=torch.float64), torch.tensor([True])
    lengths, cut = torch.tensor([100]), torch.tensor([False])
    with pytest.raises(ValueError, match="not finite"):
        shape_overlong(lowest, valid, lengths, cut, max_length=100, tail=1, factor=1e308)


@pytest.mark.parametrize(
    ("length", "cut_short", "expected"),
    [
        (80, False, 0.0),
        (90, False, -0.25),
        (100, False, -0.5),
        (120, False, -1.0),
        (90, True, -0.5),
        (3, True, -0.5),
        (120, True, -1.0),
    ],
)
def test_the_overlong_penalty_grows_over_the_tail(length, cut_short, expected):
    lengths, cut = torch.tensor([length]), torch.tensor([cut_short])
    assert overlong_penalty(lengths, cut, max_length=100, tail=20, factor=0.5).tolist() == [expected]
    shaped = shape_overlong(
        torch.tensor([1.0]), torch.tensor([True]), lengths, cut, max_length=100, tail=20, factor=0.5
    )
    assert shaped.tolist() == [1.0 + expected]


def test_the_length_of_the_tail_must_be_positive():
    with pytest.raises(ValueError, match="must be 1 or more"):
        overlong_penalty(torch.tensor([1]), torch.tensor([False]), max_length=9, tail=0, factor=1.0)
