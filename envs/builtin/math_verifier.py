r"""The reward `math`: mathematical equality with the gold answer, by math-verify 0.9.

::

    gold \frac12   "... so it is 0.5"             1.0
    gold 4         "\boxed{3} ... \boxed{4}"      0.0   two answers count as none
    gold 4         "no idea"                      0.0
    gold 4         "\boxed{9^{9^{9^9}}}"          0.0   reason timeout: only the answer is unmanageable
    gold \frac{1}{ anything                       invalid, bad_reference
    gold "48/2 = 24, and ...\n#### 72"  "72"      1.0   the column `answer` of GSM8K: a solution, then the answer
    gold NaN       anything                       invalid, bad_reference: a missing value in a data frame
    gold 9^{9^{9^9}}  "4"                         invalid, timeout: the gold answer is unmanageable

math-verify uses an alarm signal, which works only in a main thread: in a thread pool a right answer looks wrong. Its
timeout exception is not an `Exception`, and without `raise_on_error` a timeout silently means "wrong". So it runs in
the main threads of killable child processes (`CallOptions`), and each step distinguishes errors in the data, in the
model's answer and in the verifier.

A policy must not be able to choose to be invalid, so the gold answer is read in a separate step: it is parsed and
compared with a number. Once that worked, whatever the verifier cannot do in time, in memory or at all with the model's
answer is a measured 0.0 that keeps its reason. A machine or an installation that fails (`ImportError`, `OSError`), or a
verifier that can no longer compare the gold answer with itself, measures nothing.

Other reward functions use `gold_column`, the gold answers in the data, and `bad_reference`, the result for
an invalid one.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from envs.call import describe_error
from envs.messages import answer_text, last_assistant_text
from envs.references import missing_extra
from envs.rewards.loading import CallOptions
from stream.validity import Measured, Reward, RewardReason, Unmeasured, worst_reward

PROCESSES = 2
"""Child processes, unless `rewards.processes` is set."""
DEFAULT_VERIFIER = "math_verify"
_NAN = re.compile(r"\W*(?:(?:boxed|text|mathrm)\W*)?nan\W*", re.IGNORECASE)
"""A missing number; math-verify reads it as a product of letters."""
_SOLUTION_END = "####"
"""Stands between a worked solution and its answer in GSM8K and in sets made like it. No LaTeX has it."""
_TIMEOUT_S = 5
"""math-verify's own timeout for each step; the process pool enforces the hard deadline."""


class Math:
    r"""1.0 if the model's last message equals the gold answer, else 0.0.

    Args:
        answer: name of the column with the gold answers: LaTeX, with or without dollars or `\boxed`. Of a solution with
            `####`, as in GSM8K, what follows the last `####` is the gold answer.
        verifier: name in `VERIFIERS`.
        precision: decimal places to which numbers are compared.
        reasoning_delimiters: texts that end reasoning; the answer is what follows the last one. A message that begins
            with reasoning and does not end it has no answer, one without reasoning is the answer. Empty: the whole
            message is always the answer.
    """

    call_options = CallOptions(processes=PROCESSES, granularity="row", isolation="sandbox")

    def __init__(
        self,
        answer: str = "answer",
        verifier: str = DEFAULT_VERIFIER,
        precision: int = 6,
        reasoning_delimiters: Sequence[str] = ("</think>", "[/THINK]"),
    ) -> None:
        if isinstance(reasoning_delimiters, str) or not all(isinstance(each, str) for each in reasoning_delimiters):
            raise ValueError(f"reasoning_delimiters is {reasoning_delimiters!r}; expected a list of texts")
        self._delimiters = tuple(filter(None, reasoning_delimiters))
        self._column = answer
        self._precision = precision
        self._equal = get_verifier(verifier)

    def prepare(self) -> None:
        """Run once in each process, so that slow imports do not count towards a call's deadline."""
        self._equal("1", r"\boxed{1}", self._precision)

    def __call__(
        self, completions: Sequence[Any], set_fallback: Callable[[list[Reward]], None] | None = None, **columns: Any
    ) -> list[Reward]:
        """Score completions.

        Args:
            completions: conversations, or texts.
            set_fallback: gets the rewards that count if this call is killed.
            **columns: columns of the data, among them the gold answers.
        """
        rewards: list[Reward] = []
        for gold, completion in zip(gold_column(columns, self._column), completions, strict=True):
            if set_fallback is not None and is_comparable(gold):
                later = [Unmeasured(RewardReason.TIMEOUT, "the call ended first")] * (
                    len(completions) - len(rewards) - 1
                )
                set_fallback([*rewards, UNMANAGEABLE, *later])
            text = answer_text(last_assistant_text(completion), self._delimiters)
            rewards.append(self._equal(gold, text, self._precision))
        return rewards


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


UNMANAGEABLE = worst_reward(0.0, RewardReason.TIMEOUT, "math-verify could not judge the answer")
"""Reward of an answer that is killed with the verifier; the reason and its detail are completed then."""


def math_verify(gold: Any, text: str, precision: int = 6) -> Reward:
    """Return whether a text states the gold answer. Call it only in the main thread of a killable process.

    Args:
        gold: a string, or a number.
        text: the model's message.
        precision: decimal places to which numbers are compared.

    Returns:
        1.0 or 0.0. A 0.0 with a reason: the gold answer is fine, and the text cannot be compared with it. `Unmeasured`
        if the gold answer cannot be used.
    """
    expected = _read_gold(gold)
    if isinstance(expected, Unmeasured):
        return expected
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse
    from math_verify.errors import TimeoutException

    step = "parse"
    try:
        found = parse(text, (ExprExtractionConfig(), LatexExtractionConfig()), **_parse_limits())
        step = "compare"
        return Measured(float(_compare(expected, found, precision)))
    except TimeoutException:  # not a subclass of Exception
        if step == "compare" and not is_comparable(gold):
            return Unmeasured(
                RewardReason.TIMEOUT, f"math-verify did not compare the gold answer within {_TIMEOUT_S} s"
            )
        return worst_reward(0.0, RewardReason.TIMEOUT, f"math-verify did not {step} the answer within {_TIMEOUT_S} s")
    except (ImportError, OSError):  # a failure of the machine
        raise
    except Exception as error:  # the library raises many types for unreadable input
        if step == "parse" and not isinstance(error, MemoryError):
            return Measured(0.0)
        if step == "compare" and not _compare(expected, expected, precision):
            raise
        detail = f"math-verify could not {step} the answer: {describe_error(error)}"
        return worst_reward(0.0, RewardReason.RAISED, detail)


def is_comparable(gold: Any) -> bool:
    """Return whether the gold answer parses and can be compared with a number in time; computed once for each one."""
    from math_verify.errors import TimeoutException

    try:
        return not isinstance(_read_gold(gold), Unmeasured) and _probe(str(gold), _TIMEOUT_S)
    except TimeoutException:  # not a subclass of Exception
        return False


def _read_gold(gold: Any) -> list[Any] | Unmeasured:
    """Parse a gold answer, or return why it cannot be used."""
    if isinstance(gold, bool) or not isinstance(gold, str | int | float):
        return Unmeasured(
            RewardReason.BAD_REFERENCE, f"the gold answer is a {type(gold).__name__}, neither text nor number"
        )
    answer = str(gold).rpartition(_SOLUTION_END)[2].strip()
    if _NAN.fullmatch(answer):
        return bad_reference(gold, "is not a number")
    from math_verify.errors import TimeoutException

    try:
        expected = list(_parse_gold(answer))
    except TimeoutException:  # not a subclass of Exception
        return Unmeasured(RewardReason.TIMEOUT, f"math-verify did not parse the gold answer within {_TIMEOUT_S} s")
    except MemoryError:
        return Unmeasured(RewardReason.RAISED, "math-verify needed too much memory to parse the gold answer")
    except (ImportError, OSError):  # a failure of the machine
        raise
    except Exception:  # noqa: BLE001  (the library raises many types for unreadable input)
        return bad_reference(gold, "is not an expression")
    if all(isinstance(expression, str) for expression in expected):  # nothing parsed, or only text
        return bad_reference(gold, "is not an expression")
    return expected


@lru_cache(maxsize=1024)  # all completions of a group have the same gold answer; an error is not kept
def _parse_gold(gold: str) -> tuple[Any, ...]:
    from math_verify import LatexExtractionConfig, parse

    return tuple(parse(f"\\boxed{{{gold}}}", (LatexExtractionConfig(),), **_parse_limits()))


@lru_cache(maxsize=1024)
def _probe(gold: str, _timeout_s: float) -> bool:
    """Compare a gold answer with a number, which evaluates it; return whether that ended in time."""
    from math_verify.errors import TimeoutException

    try:
        _compare(_read_gold(gold), _read_gold(1), 6)
    except TimeoutException:  # not a subclass of Exception
        return False
    except (ImportError, OSError):  # a failure of the machine
        raise
    except Exception:  # noqa: BLE001  (comparing with an answer of its own kind may work)
        return True
    return True


def _compare(expected: Any, found: Any, precision: int) -> bool:
    from math_verify import verify

    return bool(verify(expected, found, float_rounding=precision, timeout_seconds=_TIMEOUT_S, raise_on_error=True))


def _parse_limits() -> dict[str, Any]:
    return {"parsing_timeout": _TIMEOUT_S, "raise_on_error": True}


VERIFIERS: dict[str, Verifier] = {DEFAULT_VERIFIER: math_verify}


_MAX_SHOWN_CHARS = 200


def gold_column(columns: Mapping[str, Sequence[Any]], column: str) -> Sequence[Any]:
    """Return the column with the gold answers.

    Raises:
        KeyError: the data has no such column.
    """
    golds = columns.get(column)
    if golds is None:
        raise KeyError(f"the data has no column {column!r}; set args.answer to the column with the gold answers")
    return golds


def bad_reference(gold: Any, why: str) -> Unmeasured:
    """Return the reward for a gold answer that is unusable: the completion is invalid, the data is at fault."""
    return Unmeasured(RewardReason.BAD_REFERENCE, f"the gold answer {str(gold)[:_MAX_SHOWN_CHARS]!r} {why}")
