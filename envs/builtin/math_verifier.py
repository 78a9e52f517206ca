r"""The reward `math`: is the answer the same expression as the gold one? Judged by math-verify 0.9.

::

    gold \frac12   "... so it is 0.5"             1.0
    gold 4         "\boxed{3} ... \boxed{4}"      0.0   two answers are none
    gold 4         "no idea"                      0.0   the model's business
    gold \frac{1}{ anything                       invalid, invalid_gold
    gold 1         "\boxed{9^{9^{9^9}}}"          invalid, timeout; the farming guard watches these

math-verify sets an alarm, which works in a main thread alone, and in a thread pool makes a right answer look wrong; its
own timeout is silently "wrong" unless `raise_on_error` is set, and is no `Exception`. So it runs in the main threads
of processes that are killed past their deadline (`Calling`), and each of its calls is judged apart: what the data did
wrong, what the model did, and what the verifier did.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from envs.builtin.gold_answers import gold_column, invalid_gold
from envs.extras import missing_extra
from envs.messages import last_assistant_text
from envs.rewards.loading import CallOptions
from stream.validity import Measured, Reward, RewardReason, Unmeasured

PROCESSES = 2
"""Unless the setting says otherwise."""
DEFAULT_VERIFIER = "math_verify"
_TIMEOUT_S = 5
"""math-verify's own, for each of its steps; a pool's deadline is the hard one."""


class Math:
    """1.0 where the last thing the model said is equal to the gold answer, else 0.0.

    Args:
        answer: the column with the gold answers: LaTeX, with or without dollars or a box around it.
        verifier: who judges; one of `VERIFIERS`.
        precision: decimal places to which numbers are compared.
    """

    call_options = CallOptions(processes=PROCESSES, granularity="row")

    def __init__(self, answer: str = "answer", verifier: str = DEFAULT_VERIFIER, precision: int = 6) -> None:
        self._column = answer
        self._precision = precision
        self._equal = get_verifier(verifier)

    def prepare(self) -> None:
        """Load what is slow to load, once in each process."""
        self._equal("1", r"\boxed{1}", self._precision)

    def __call__(self, completions: Sequence[Any], **columns: Sequence[Any]) -> list[Reward]:
        """Judge completions.

        Args:
            completions: conversations, or texts.
            **columns: of the data; the gold answers are one of them.
        """
        judged = zip(gold_column(columns, self._column), completions, strict=True)
        return [self._equal(gold, last_assistant_text(completion), self._precision) for gold, completion in judged]


Verifier = Callable[[Any, str, int], Reward]


def get_verifier(name: str) -> Verifier:
    """The verifier of that name.

    Raises:
        ValueError: there is none.
        MissingExtraError: its library is not installed.
    """
    if name not in VERIFIERS:
        raise ValueError(f"there is no verifier {name!r}; known are: {', '.join(VERIFIERS)}")
    if find_spec("math_verify") is None:
        raise missing_extra("math_verify", "math")
    return VERIFIERS[name]


def math_verify(gold: Any, text: str, precision: int = 6) -> Reward:
    """Whether a text says the gold answer. In a process's main thread only, and in one that may be killed.

    Args:
        gold: a string, or a number.
        text: what the model said.
        precision: decimal places to which numbers are compared.
    """
    if isinstance(gold, bool) or not isinstance(gold, str | int | float):
        return Unmeasured(
            RewardReason.BAD_REFERENCE, f"the gold answer is a {type(gold).__name__}, no text and no number"
        )
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException

    from_latex, from_text = LatexExtractionConfig(), ExprExtractionConfig()
    limits = {"parsing_timeout": _TIMEOUT_S, "raise_on_error": True}
    step = "parse the gold answer"
    try:
        expected = parse(f"\\boxed{{{gold}}}", (from_latex,), **limits)
        if all(isinstance(expression, str) for expression in expected):  # nothing, or the text itself for want of more
            return invalid_gold(gold, "is no expression")
        step = "parse the prediction"
        found = parse(text, (from_text, from_latex), **limits)
        step = "compare the two"
        equal = verify(expected, found, float_rounding=precision, timeout_seconds=_TIMEOUT_S, raise_on_error=True)
    except TimeoutException:  # no Exception
        return Unmeasured(RewardReason.TIMEOUT, f"math-verify did not {step} within {_TIMEOUT_S} s")
    except MemoryError:
        return Unmeasured(RewardReason.RAISED, f"math-verify needed too much memory to {step}")
    except (ImportError, OSError):  # the machine's failure, whoever's words were being read
        raise
    except Exception:  # the library's ways of saying that it cannot read this
        if step == "parse the gold answer":
            return invalid_gold(gold, "is no expression")
        if step == "parse the prediction":
            return Measured(0.0)
        raise
    return Measured(float(equal))


VERIFIERS: dict[str, Verifier] = {DEFAULT_VERIFIER: math_verify}
