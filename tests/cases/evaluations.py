"""A run's evaluations, as a reader of its folder finds them."""

from pathlib import Path

import msgspec

from workers.runs.evaluations import FILE, EvaluationResult


def read_evaluations(folder: Path) -> list[EvaluationResult]:
    """Read every line of `eval.jsonl`."""
    return [msgspec.json.decode(line, type=EvaluationResult) for line in (folder / FILE).read_bytes().splitlines()]
