"""The reward `code_jaccard`: the exact rules."""

import pytest

from envs.builtin.code_jaccard import CodeJaccard, similarity
from stream.validity import Measured, RewardReason


@pytest.mark.parametrize(
    ("gold", "text", "expected"),
    [
        ("x = a + b", "x = a - b", 2 / 3),
        ("def add(a, b): return a + b", "return a + b", 0.253968),
        ("a b c d", "a b", 0.214286),
        (" PRINT('Hello') ", "print('hello')", 1.0),
        ("x", "", 0.0),
        ("a a a", "a", 0.2),  # words form a set; lengths count every word
    ],
)
def test_similarity_of_two_texts(gold, text, expected):
    assert similarity(gold, text) == pytest.approx(expected, abs=5e-7)


@pytest.mark.parametrize("gold", [None, 3, ["x"], b"x", "", " \n"])
def test_a_gold_answer_without_a_word_is_invalid(gold):
    (reward, other) = CodeJaccard()(completions=["x", "x"], answer=[gold, "x"])
    assert reward.reason is RewardReason.BAD_REFERENCE
    assert other == Measured(1.0)


def test_a_completion_that_is_neither_text_nor_conversation_is_unmeasured():
    (reward,) = CodeJaccard()(completions=[3], answer=["x"])
    assert reward.reason is RewardReason.RAISED


def test_the_models_last_message_counts():
    messages = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert CodeJaccard("code")(completions=[messages], code=["b"]) == [Measured(1.0)]
