r"""The reward `math`: mathematical equality with the gold answer, by math-verify 0.9.

::

    gold \frac12   "... so it is 0.5"             1.0
    gold 4         "\boxed{3} ... \boxed{4}"      0.0   two answers count as none
    gold 4         "no idea"                      0.0
    gold \frac{1}{ anything                       invalid, invalid_gold
    gold 1         "\boxed{9^{9^{9^9}}}"          invalid, timeout

math-verify uses an alarm signal, which works only in a main thread: in a thread pool a right answer looks wrong. Its
timeout exception is not an `Exception`, and without `raise_on_error` a timeout silently means "wrong". So it runs in
main threads of killable child processes (`CallOptions`), and each step distinguishes errors in the data, in the model's
answer and in the verifier. A model can provoke timeouts; `[abort]` stops a run in which too many completions are
invalid.
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
"""Child processes, unless `rewards.processes` is set."""
DEFAULT_VERIFIER = "math_verify"
_TIMEOUT_S = 5
"""math-verify's own timeout for each step; the process pool enforces the hard deadline."""


class Math:
    r"""1.0 if the model's last message equals the gold answer, else 0.0.

    Args:
        answer: name of the column with the gold answers: LaTeX, with or without dollars or `\boxed`.
        verifier: name in `VERIFIERS`.
        precision: decimal places to which numbers are compared.
    """

    call_options = CallOptions(processes=PROCESSES, granularity="row")

    def __init__(self, answer: str = "answer", verifier: str = DEFAULT_VERIFIER, precision: int = 6) -> None:
        self._column = answer
        self._precision = precision
        self._equal = get_verifier(verifier)

    def prepare(self) -> None:
        """Run once in each process, so that slow imports do not count towards a call's deadline."""
        self._equal("1", r"\boxed{1}", self._precision)

    def __call__(self, completions: Sequence[Any], **columns: Sequence[Any]) -> list[Reward]:
        """Score completions.

        Args:
            completions: conversations, or texts.
            **columns: columns of the data, among them the gold answers.
        """
        judged = zip(gold_column(columns, self._column), completions, strict=True)
        return [self._equal(gold, last_assistant_text(completion), self._precision) for gold, completion in judged]


Verifier = Callable[[Any, str, int], Reward]


def get_verifier(name: str) -> Verifier:
    """Return a verifier by name.

    Raises:
        ValueError: unknown name.
        MissingExtraError: its library is not installed.
    """
    if name not in VERIFIERS:
        raise ValueError(f"there is no verifier {name!r}; known verifiers: {', '.join(VERIFIERS)}")
    if find_spec("math_verify") is None:
        raise missing_extra("math_verify", "math")
    return VERIFIERS[name]


def math_verify(gold: Any, text: str, precision: int = 6) -> Reward:
    """Return whether a text states the gold answer. Call it only in the main thread of a killable process.

    Args:
        gold: a string, or a number.
        text: the model's message.
        precision: decimal places to which numbers are compared.
    """
    if isinstance(gold, bool) or not isinstance(gold, str | int | float):
        return Unmeasured(
            RewardReason.INVALID_GOLD, f"the gold answer is a {type(gold).__name__}, neither text nor number"
        )
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException

    from_latex, from_text = LatexExtractionConfig(), ExprExtractionConfig()
    limits = {"parsing_timeout": _TIMEOUT_S, "raise_on_error": True}
    step = "parse the gold answer"
    try:
        expected = parse(f"\\boxed{{{gold}}}", (from_latex,), **limits)
        if all(isinstance(expression, str) for expression in expected):  # nothing parsed, or only text
            return invalid_gold(gold, "is not an expression")
        step = "parse the prediction"
        found = parse(text, (from_text, from_latex), **limits)
        step = "compare the two"
        equal = verify(expected, found, float_rounding=precision, timeout_seconds=_TIMEOUT_S, raise_on_error=True)
    except TimeoutException:  # not a subclass of Exception
        return Unmeasured(RewardReason.TIMEOUT, f"math-verify did not {step} within {_TIMEOUT_S} s")
    except MemoryError:
        return Unmeasured(RewardReason.RAISED, f"math-verify needed too much memory to {step}")
    except (ImportError, OSError):  # a failure of the machine
        raise
    except Exception:  # the library raises many types for unreadable input
        if step == "parse the gold answer":
            return invalid_gold(gold, "is not an expression")
        if step == "parse the prediction":
            return Measured(0.0)
        raise
    return Measured(float(equal))


VERIFIERS: dict[str, Verifier] = {DEFAULT_VERIFIER: math_verify}
