"""The reward `code_jaccard`: how alike two pieces of code are, by their words and their lengths.

::

    "x = a + b"                    "x = a - b"        .666667
    "def add(a, b): return a + b"  "return a + b"     .253968
    " PRINT('Hello') "             "print('hello')"   1
"""

from collections.abc import Sequence
from typing import Any

from envs.builtin.gold_answers import gold_column
from envs.messages import last_assistant_text
from stream.validity import Reward, RewardReason, Unmeasured, measure


class CodeJaccard:
    """The similarity of what the model said last to the gold code.

    Args:
        answer: the column with the gold code.
    """

    def __init__(self, answer: str = "answer") -> None:
        self._column = answer

    def __call__(self, completions: Sequence[Any], **columns: Sequence[Any]) -> list[Reward]:
        """Judge completions.

        Args:
            completions: conversations, or texts.
            **columns: of the data; the gold code is one of them.
        """
        return [
            _judge(gold, completion)
            for gold, completion in zip(gold_column(columns, self._column), completions, strict=True)
        ]


def similarity(gold: str, text: str) -> float:
    """Jaccard's index of the two texts' words, times the ratio of their lengths in characters; in [0, 1].

    Both are stripped and lowered first. Equal texts have 1, also two empty ones; no other text has anything in common
    with an empty gold one.
    """
    gold, text = gold.strip().lower(), text.strip().lower()
    if gold == text:
        return 1.0
    expected, found = set(gold.split()), set(text.split())
    if not expected:
        return 0.0
    index = len(expected & found) / len(expected | found)
    return min(1.0, max(0.0, index * min(len(gold), len(text)) / max(len(gold), len(text))))


def _judge(gold: Any, completion: Any) -> Reward:
    if not isinstance(gold, str):
        return Unmeasured(RewardReason.BAD_REFERENCE, f"the gold code is a {type(gold).__name__}, not a string")
    try:
        return measure(similarity(gold, last_assistant_text(completion)))
    except TypeError as error:
        return Unmeasured(RewardReason.RAISED, str(error))
