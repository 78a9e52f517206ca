"""`eval.jsonl` in a run's folder: one line per evaluation, which the trainer writes and every screen reads."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct, field

FILE: Final = "eval.jsonl"
"""Name of the file in the run's folder."""


class EvaluationStats(Struct, kw_only=True):
    """Result of a policy on a set of prompts; `n = valid + mixed + sum of invalid`."""

    prompts: int
    n: int
    """Number of completions requested."""
    valid: int
    """Completions sampled by this version alone, with a measured reward."""
    invalid: dict[str, int]
    """By state. `dead`: the prompt is a dead letter; `missing`: no result came in time."""
    mixed: int
    """Completions with a token of another policy version; they count in no mean."""
    mean_valid: float | None
    """Mean reward of valid completions; None if there is none."""
    mean_all: float | None
    """The same sum divided by valid and invalid completions, as if an invalid one had reward 0."""
    pass_at: dict[str, dict[str, float]]
    """Unbiased estimate that one of k completions succeeds, by k, then `valid` and `all`: mean over prompts with k such
    completions. `all` counts an invalid completion as a failure."""


class EvaluationResult(Struct, kw_only=True):
    """One evaluation, a line of `eval.jsonl`."""

    version: int
    """The evaluated policy version; -1 for a model that no run published."""
    step: int
    time: float
    """Unix time at the end, in seconds."""
    seconds: float
    """Duration."""
    overall: EvaluationStats
    environments: dict[str, EvaluationStats] = field(default_factory=dict)
    """By environment name; empty if the run has none."""


def read_evaluations(folder: Path) -> list[EvaluationResult]:
    """Return all evaluations of a run, in order. Blocks on files."""
    return [result for result, _ in read_lines(folder / FILE)]


def read_lines(path: Path) -> Iterator[tuple[EvaluationResult, int]]:
    """Yield the complete lines, each with the file's length up to its end. A damaged line is skipped."""
    if not path.exists():
        return
    end_offset = 0
    for text in path.read_bytes().splitlines(keepends=True):
        end_offset += len(text)
        if not text.endswith(b"\n"):
            return
        with suppress(ValueError):
            yield msgspec.json.decode(text, type=EvaluationResult), end_offset
