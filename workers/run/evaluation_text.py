"""Format the progress and the result of an evaluation as one line of text."""

from collections.abc import Mapping
from typing import Any

from stream.operator.run_status import EvaluationStatus


def format_progress(view: EvaluationStatus) -> str:
    """Return the progress of the running evaluation; empty if none is running."""
    if not view.is_running:
        return ""
    dead = view.total - view.unfinished - view.results
    return f"version {view.version}: {view.results + dead} of {view.total} prompts" + (f", {dead} dead" if dead else "")


def format_result(line: Mapping[str, Any]) -> str:
    """Return a line of `eval.jsonl` as text; empty without one.

    Where they differ, both scores are shown: over valid completions, and over all, with invalid ones counted as wrong.
    """
    if not line:
        return ""
    score = line["overall"]
    parts = [f"mean {_both(score['mean_valid'], score['mean_all'])}"]
    parts += [f"pass@{k} {_both(both.get('valid'), both.get('all'))}" for k, both in score["pass_at"].items()]
    invalid = sum(score["invalid"].values())
    parts += [f"{score['valid']} of {score['n']} valid"] if invalid else []
    parts += [f"{score['mixed']} mixed"] if score["mixed"] else []
    return f"version {line['version']}: {' · '.join(parts)}"


def _both(valid: float | None, every: float | None) -> str:
    one, other = ("-" if value is None else f"{value:.3f}" for value in (valid, every))
    return one if one == other else f"{one} ({other} of all)"
