"""The calculator, and the exact answer that requires a call."""

import anyio
import pytest

from envs.builtin.calculator import Calculator, exact_answer, final_answer
from envs.factory import EnvironmentFactory
from envs.rewards import RewardBatch, RewardFunction
from envs.snapshot import freeze, thaw
from stream.validity import Measured, RewardReason


def played(calls=1):
    env = Calculator()
    env.reset(problem="Start with 97, times 7.", answer=679, row="other")
    for _ in range(calls):
        env.multiply(97, 7)
    return env


def said(text):
    return [
        {"role": "assistant", "content": "calling"},
        {"role": "tool", "content": "679"},
        {"role": "assistant", "content": text},
    ]


def score(text, gold=679, calls=1):
    (reward,) = exact_answer(completions=[said(text)], environments=[played(calls)], answer=[gold], prompts=["p"])
    return reward


def test_the_tools_compute():
    env = played(0)
    assert (env.add(2, 3), env.subtract(2, 3), env.multiply(2, 3)) == (5, -1, 6)
    assert [(call.tool, call.result) for call in env.calls] == [("add", 5), ("subtract", -1), ("multiply", 6)]


def test_reset_forgets_the_calls():
    env = played(2)
    env.reset(problem="p", answer=1)
    assert env.calls == []


def test_numbers_do_not_grow_without_bound():
    env = played(0)
    with pytest.raises(ValueError, match="100 digits"):
        env.multiply(10**60, 10**60)
    assert env.calls == []


def test_the_right_answer_after_a_call_scores_1():
    assert score("So it is. Answer: 679") == Measured(1.0)


@pytest.mark.parametrize("gold", [679, "679", " 679 ", 679.0], ids=repr)
def test_gold_may_be_written_as_a_number_or_as_text(gold):
    assert score("Answer: 679", gold) == Measured(1.0)


@pytest.mark.parametrize(
    "text",
    [
        "Answer: 6790",
        "Answer: 679.5",
        "Answer: 67",
        "Answer: -679",
        "679",
        "answer: 679",
        "Answer: 679 Answer: 3",
        "",
        None,
    ],
)
def test_any_other_answer_scores_a_valid_0(text):
    assert score(text) == Measured(0.0)


def test_the_right_answer_without_a_call_scores_0():
    assert score("Answer: 679", calls=0) == Measured(0.0)


def test_only_the_last_message_counts():
    assert final_answer([*said("Answer: 679"), {"role": "assistant", "content": "no answer"}]) is None
    assert final_answer("Answer: 679.") == 679
    assert final_answer([]) is None
    assert final_answer("Answer: " + "9" * 10_000) is None


@pytest.mark.parametrize("gold", [None, "many", 0.5, float("nan"), True])
def test_a_gold_answer_that_is_not_an_integer_makes_the_reward_unmeasured(gold):
    assert score("Answer: 679", gold).reason is RewardReason.BAD_REFERENCE


async def test_the_reward_function_is_found_by_name_and_scores_the_snapshot():
    factory = await anyio.to_thread.run_sync(EnvironmentFactory.load, "calculator")
    function = await anyio.to_thread.run_sync(RewardFunction.load, "calculator_answer")
    snapshot = thaw(freeze(played(), 10_000), factory)
    given = RewardBatch([[]], [said("Answer: 679")], [[1]], [snapshot], {"answer": [679], "problem": ["p"]})
    assert await function(given, 5.0) == [Measured(1.0)]
