"""The demo's task: two steps of arithmetic, each one call of a calculator tool.

To solve `Start with 97, times 7, then minus 46.`, the model calls `multiply(97, 7)`, then `subtract(679, 46)` with the
result, then answers `Answer: 633`. Intermediate results are never negative.
"""

import itertools
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

TOOLS = {"plus": "add", "minus": "subtract", "times": "multiply"}
"""The calculator's tool for each word that a problem uses for an operation."""

ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
}
"""Results of the tools, for scripted transcripts."""

HELD_OUT_EVERY = 10
"""One of this many problems is held out of training."""

MAX_ROWS = 100_000
"""Up to this many of about 450,000 training and 50,000 held-out problems are drawn quickly."""


@dataclass(frozen=True)
class Operation:
    """One tool call: `Step("multiply", 97, 7)` has the result 679."""

    tool: str
    a: int
    b: int

    @property
    def result(self) -> int:
        """Answer of the tool."""
        return ARITHMETIC[self.tool](self.a, self.b)


@dataclass(frozen=True)
class Problem:
    """A problem and its solution.

    Example: `Problem("Start with 97, times 7, then minus 46.", 633, (multiply 97 7, subtract 679 46))`
    """

    text: str
    answer: int
    steps: tuple[Operation, Operation]


def training_rows(n: int, seed: int) -> list[dict[str, Any]]:
    """Return `n` different training problems as rows of a prompt file: `prompt` (messages), `problem`, `answer`.

    Equal seeds give equal rows in every process. No row is a held-out problem.

    Raises:
        ValueError: `n` is more than `MAX_ROWS`.
    """
    return _rows(training_problems(seed), n)


def held_out_rows(n: int = 200, seed: int = 0) -> list[dict[str, Any]]:
    """Return `n` different problems that are never trained on, in the format of `training_rows`.

    Raises:
        ValueError: `n` is more than a tenth of `MAX_ROWS`.
    """
    if n > MAX_ROWS // HELD_OUT_EVERY:
        raise ValueError(f"{n} held-out problems asked for; at most {MAX_ROWS // HELD_OUT_EVERY}")
    return _rows((problem for problem in _problems(seed) if is_held_out(problem.text)), n)


def training_problems(seed: int) -> Iterator[Problem]:
    """Yield training problems forever; problems may repeat."""
    return (problem for problem in _problems(seed) if not is_held_out(problem.text))


def is_held_out(text: str) -> bool:
    """Whether a problem is held out; depends only on its text, and is the same in every process."""
    return zlib.crc32(text.encode()) % HELD_OUT_EVERY == 0


def _problems(seed: int) -> Iterator[Problem]:
    rng = random.Random(seed)
    while True:
        problem = _draw(rng)
        if min(step.result for step in problem.steps) >= 0:
            yield problem


def _draw(rng: random.Random) -> Problem:
    start = rng.randint(50, 99)
    (word_b, b), (word_c, c) = (_operation(rng) for _ in range(2))
    first = Operation(TOOLS[word_b], start, b)
    second = Operation(TOOLS[word_c], first.result, c)
    return Problem(f"Start with {start}, {word_b} {b}, then {word_c} {c}.", second.result, (first, second))


def _operation(rng: random.Random) -> tuple[str, int]:
    word = rng.choice(sorted(TOOLS))
    return word, rng.randint(2, 9 if word == "times" else 49)


def _rows(problems: Iterator[Problem], n: int) -> list[dict[str, Any]]:
    if n > MAX_ROWS:
        raise ValueError(f"{n} problems asked for; at most {MAX_ROWS}")
    seen: dict[str, Problem] = {}
    while len(seen) < n:
        problem = next(problems)
        seen.setdefault(problem.text, problem)
    return [
        {"prompt": [{"role": "user", "content": text}], "problem": text, "answer": problem.answer}
        for text, problem in itertools.islice(seen.items(), n)
    ]
