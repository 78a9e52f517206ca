"""A calculator as tools, and the demo's reward: the exact answer, after at least one tool call.

::

    Start with 97, times 7, then minus 46.   ->   multiply(97, 7)   ->   subtract(679, 46)   ->   Answer: 633
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from envs.messages import last_assistant_text
from stream.validity import Reward, RewardReason, Unmeasured, measure

_ANSWER = re.compile(r"Answer:\s*([+-]?[0-9]+)(?![0-9]|[.,][0-9])")
_LIMIT = 10**100


@dataclass(frozen=True)
class LoggedCall:
    """One tool call."""

    tool: str
    a: int
    b: int
    result: int


class Calculator:
    """Three tools for whole numbers. The problem is in the prompt.

    Its reward function is `exact_answer`, since the answer is in the model's final message, not in a tool call.
    """

    replayable = True

    def __init__(self) -> None:
        self.problem = ""
        self.answer: Any = None
        self.calls: list[LoggedCall] = []

    def reset(self, problem: str = "", answer: Any = None, **fields: Any) -> None:  # noqa: ARG002
        """Start an episode.

        Args:
            problem: text of the problem, for reading snapshots.
            answer: gold answer, for reading snapshots.
            **fields: other columns of the row.
        """
        self.problem = problem
        self.answer = answer
        self.calls = []

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The number to add to it.
        """
        return self._record_call("add", a, b, a + b)

    def subtract(self, a: int, b: int) -> int:
        """Subtract one number from another.

        Args:
            a: The number to subtract from.
            b: The number to subtract.
        """
        return self._record_call("subtract", a, b, a - b)

    def multiply(self, a: int, b: int) -> int:
        """Multiply two numbers.

        Args:
            a: The first number.
            b: The number to multiply it by.
        """
        return self._record_call("multiply", a, b, a * b)

    def _record_call(self, tool: str, a: int, b: int, result: int) -> int:
        if abs(result) >= _LIMIT:
            raise ValueError("the result has more than 100 digits")  # the model reads this
        self.calls.append(LoggedCall(tool, a, b, result))
        return result


def exact_answer(
    completions: Sequence[Any], environments: Sequence[Any], answer: Sequence[Any], **_: Any
) -> list[float | Reward]:
    """Return 1.0 if the model's last message has `Answer: N` with the right number, after at least one tool call.

    The last of several answers counts. A gold answer that is no whole number makes the completion invalid
    (`bad_reference`).

    Args:
        completions: conversations, or texts.
        environments: the thawed snapshot of each completion's `Calculator`.
        answer: the gold answers.
    """
    scored = zip(completions, environments, answer, strict=True)
    return [_score(completion, environment, gold) for completion, environment, gold in scored]


def final_answer(completion: Any) -> int | None:
    """Return the number in the last `Answer: N` of the model's last message; None without one, or if it is huge."""
    numbers = _ANSWER.findall(last_assistant_text(completion))
    return int(numbers[-1]) if numbers and len(numbers[-1]) <= len(str(_LIMIT)) else None


def _score(completion: Any, environment: Any, gold: Any) -> float | Reward:
    try:
        expected = int(gold) if isinstance(gold, float) and gold.is_integer() else int(str(gold).strip())
    except ValueError:
        return Unmeasured(RewardReason.BAD_REFERENCE, f"the answer in the data, {gold!r}, is not a whole number")
    return measure(final_answer(completion) == expected and len(environment.calls) > 0)
