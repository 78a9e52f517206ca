"""The till without a model: `python -m pytest` in this project's folder."""

from penstock.testing import call, play

REWARDS = ["rewards.py:thrift"]


def test_the_right_sum_on_the_last_receipt_scores_1():
    calls = [call("multiply", a=90, b=4), call("subtract", a=360, b=30)]
    played = play("envs.till:Till", [*calls, "Answer: 330"], fields={"answer": 330}, rewards=REWARDS)
    assert played.tool_replies == ["360", "330"]
    assert {part.name: part.reward.value for part in played.parts} == {"env": 1.0, "thrift": 1.0}
    assert played.environment.receipts == [360, 330]


def test_a_wrong_sum_scores_0_and_three_receipts_are_not_thrifty():
    turns = [[call("add", a=1, b=1), call("add", a=1, b=2), call("add", a=1, b=3)], "Answer: 4"]
    played = play("envs.till:Till", turns, fields={"answer": 330}, rewards=REWARDS)
    assert {part.name: part.reward.value for part in played.parts} == {"env": 0.0, "thrift": 0.0}


def test_words_instead_of_numbers_are_refused_and_print_no_receipt():
    played = play("envs.till:Till", [call("add", a="one", b=2)], fields={"answer": 3})
    assert played.tool_replies == ["Error: add: a: expected `int`, got `str`"]
    assert (played.reward_value, played.environment.receipts) == (0.0, [])
