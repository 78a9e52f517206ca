"""The reward `code_jaccard`: similarity of two pieces of code by their words and lengths.

::

    "x = a + b"                    "x = a - b"        .666667
    "def add(a, b): return a + b"  "return a + b"     .253968
    " PRINT('Hello') "             "print('hello')"   1
    ""                             anything           invalid, bad_reference
"""

from collections.abc import Sequence
from typing import Any

from envs.builtin.math_verifier import bad_reference, gold_column
from envs.messages import last_assistant_text
from stream.validity import Reward, RewardReason, Unmeasured, measure


class CodeJaccard:
    """Similarity of the model's last message to the gold code.

    Args:
        answer: name of the column with the gold code.
    """

    def __init__(self, answer: str = "answer") -> None:
        self._column = answer

    def __call__(self, completions: Sequence[Any], **columns: Sequence[Any]) -> list[Reward]:
        """Score completions.

        Args:
            completions: conversations, or texts.
            **columns: columns of the data, among them the gold code.

        Returns:
            A similarity in [0, 1] for each completion; `Unmeasured` where the gold code is unusable.
        """
        return [
            _score(gold, completion)
            for gold, completion in zip(gold_column(columns, self._column), completions, strict=True)
        ]


def similarity(gold: str, text: str) -> float:
    """Return the Jaccard index of the two texts' words times the ratio of their lengths in characters, in [0, 1].

    Both texts are stripped and lowercased first. Equal texts have similarity 1. The gold text has at least one word.
    """
    gold, text = gold.strip().lower(), text.strip().lower()
    if gold == text:
        return 1.0
    gold_words, words = set(gold.split()), set(text.split())
    index = len(gold_words & words) / len(gold_words | words)
    return min(1.0, max(0.0, index * min(len(gold), len(text)) / max(len(gold), len(text))))


def _score(gold: Any, completion: Any) -> Reward:
    if not isinstance(gold, str):
        return Unmeasured(RewardReason.BAD_REFERENCE, f"the gold code is a {type(gold).__name__}, not a string")
    if not gold.strip():
        return bad_reference(gold, "is empty")
    try:
        return measure(similarity(gold, last_assistant_text(completion)))
    except TypeError as error:
        return Unmeasured(RewardReason.RAISED, str(error))
