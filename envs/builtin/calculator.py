"""A calculator as tools, and the reward of the demo: the exact answer, reached with at least one call.

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
class ToolCall:
    """One call of a tool."""

    tool: str
    a: int
    b: int
    result: int


class Calculator:
    """Three tools for whole numbers. The problem itself is in the prompt.

    Scored by `exact_answer`, since an environment does not see what the model says in the end.
    """

    def __init__(self) -> None:
        self.problem = ""
        self.answer: Any = None
        self.calls: list[ToolCall] = []

    def reset(self, problem: str = "", answer: Any = None, **fields: Any) -> None:  # noqa: ARG002
        """Begin a problem.

        Args:
            problem: its text, for people.
            answer: its answer, for people.
            **fields: the row's other columns.
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
            raise ValueError("the result has more than 100 digits")  # read by the model
        self.calls.append(ToolCall(tool, a, b, result))
        return result


def exact_answer(
    completions: Sequence[Any], environments: Sequence[Any], answer: Sequence[Any], **_: Any
) -> list[float | Reward]:
    """1.0 where the last thing the model said has `Answer: N` with the right number, after at least one call.

    Where it gives several answers, the last one counts. A gold answer that is no whole number makes the completion
    invalid (`invalid_gold`): nobody can know whether the model was right.

    Args:
        completions: conversations, or texts.
        environments: what remains of each `Calculator`.
        answer: the gold answers.
    """
    scored = zip(completions, environments, answer, strict=True)
    return [_score(completion, environment, gold) for completion, environment, gold in scored]


def final_answer(completion: Any) -> int | None:
    """The number in the last `Answer: N` of the model's last message; None without one."""
    found = _ANSWER.findall(last_assistant_text(completion))
    return int(found[-1]) if found and len(found[-1]) <= len(str(_LIMIT)) else None


def _score(completion: Any, environment: Any, gold: Any) -> float | Reward:
    try:
        expected = int(gold) if isinstance(gold, float) and gold.is_integer() else int(str(gold).strip())
    except ValueError:
        return Unmeasured(RewardReason.BAD_REFERENCE, f"the answer in the data, {gold!r}, is no whole number")
    return measure(final_answer(completion) == expected and len(environment.calls) > 0)
