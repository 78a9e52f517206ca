"""Gold answers: their column in the data, and the result for an invalid one."""

from collections.abc import Mapping, Sequence
from typing import Any

from stream.validity import RewardReason, Unmeasured

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
