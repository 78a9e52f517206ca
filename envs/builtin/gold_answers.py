"""Gold answers: the column of the data that they stand in, and what is said of one that nobody can read."""

from collections.abc import Mapping, Sequence
from typing import Any

from stream.validity import RewardReason, Unmeasured

_MAX_SHOWN_CHARS = 200


def gold_column(columns: Mapping[str, Sequence[Any]], column: str) -> Sequence[Any]:
    """The gold answers of a call.

    Raises:
        KeyError: the data has no such column.
    """
    golds = columns.get(column)
    if golds is None:
        raise KeyError(f"the data has no column {column!r}; name the one with the gold answers: args.answer")
    return golds


def invalid_gold(gold: Any, why: str) -> Unmeasured:
    """Nobody can know whether the model was right: the data is at fault."""
    return Unmeasured(RewardReason.BAD_REFERENCE, f"the gold answer {str(gold)[:_MAX_SHOWN_CHARS]!r} {why}")
