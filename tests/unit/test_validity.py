"""Which values are rewards."""

import ast
import math
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from stream.validity import Measured, RewardReason, Unmeasured, measure, worst_reward

ROOT = Path(__file__).resolve().parents[2]
JUDGES = [path for folder in ("adapters", "builtin", "remote") for path in (ROOT / "envs" / folder).glob("*.py")]


def test_a_text_that_cannot_be_judged_has_the_worst_value_if_there_is_one_and_keeps_the_reason():
    assert worst_reward(-1.0, RewardReason.RAISED, "it") == Measured(-1.0, RewardReason.RAISED, "it")
    assert worst_reward(0.0, RewardReason.TIMEOUT, "") == Measured(0.0, RewardReason.TIMEOUT)
    assert worst_reward(None, RewardReason.RAISED, "it") == Unmeasured(RewardReason.RAISED, "it")


@pytest.mark.parametrize("path", JUDGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_other_code_of_ours_makes_a_measured_reward_with_a_reason(path):
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    named = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "Measured"]
    assert [call.lineno for call in named if len(call.args) + len(call.keywords) > 1] == []


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (1, 1.0),
        (0.0, 0.0),
        (-0.25, -0.25),
        (True, 1.0),
        (False, 0.0),
        (Fraction(1, 2), 0.5),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (np.array(0.5), 0.5),
        (np.array([0.5]), 0.5),
        (np.array([[2]]), 2.0),
        (Measured(0.5), 0.5),
    ],
)
def test_numbers_are_rewards(value, reward):
    result = measure(value)
    assert result == Measured(reward)
    assert type(result.value) is float


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, RewardReason.MISSING),
        (math.nan, RewardReason.NOT_FINITE),
        (math.inf, RewardReason.NOT_FINITE),
        (-math.inf, RewardReason.NOT_FINITE),
        (10**400, RewardReason.NOT_FINITE),
        (np.float32("nan"), RewardReason.NOT_FINITE),
        (1e30, RewardReason.TOO_LARGE),
        (-1e39, RewardReason.TOO_LARGE),
        (10**19, RewardReason.TOO_LARGE),
        (Measured(1e19), RewardReason.TOO_LARGE),
        (Measured(math.nan), RewardReason.NOT_FINITE),
        ("1.0", RewardReason.NOT_NUMERIC),
        ("", RewardReason.NOT_NUMERIC),
        ([1.0], RewardReason.NOT_NUMERIC),
        ({"reward": 1.0}, RewardReason.NOT_NUMERIC),
        (1 + 0j, RewardReason.NOT_NUMERIC),
        (Decimal("0.5"), RewardReason.NOT_NUMERIC),
        (object(), RewardReason.NOT_NUMERIC),
        (np.array([1.0, 2.0]), RewardReason.NOT_NUMERIC),
        (np.array([]), RewardReason.NOT_NUMERIC),
        (np.array("1.0"), RewardReason.NOT_NUMERIC),
    ],
)
def test_other_values_are_unmeasured_with_a_reason(value, reason):
    result = measure(value)
    assert isinstance(result, Unmeasured)
    assert (result.reason, bool(result.detail)) == (reason, True)


def test_a_measured_reward_keeps_its_reason():
    given = Measured(0.0, RewardReason.TIMEOUT, "the answer hangs")
    assert measure(given) == given


def test_unmeasured_rewards_stay_unmeasured():
    result = Unmeasured(RewardReason.TIMEOUT, "30 s")
    assert measure(result) is result


def test_one_element_tensors_are_numbers():
    import torch

    assert measure(torch.tensor(0.5, requires_grad=True)) == Measured(0.5)
    assert measure(torch.tensor([2])) == Measured(2.0)
    assert isinstance(measure(torch.tensor([1.0, 2.0])), Unmeasured)
