"""One row of a completion as columns: for each token after the prompt what engine and trainer recorded of it."""

import math
from array import array
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from stream.records import Completion, Row, TrainedCompletion, TrainedRow


class TokenColumns(Struct, frozen=True, kw_only=True):
    """One value for each token after the prompt; a whole column is None if the trainer's part is not recorded."""

    token_ids: list[int]
    sampled_mask: list[int]
    logprobs: list[float | None]
    """The engine's, in nats; None for tokens that were not sampled."""
    versions: list[int | None]
    """The policy version that sampled the token."""
    loss_mask: list[int] | None
    """1 where the token bears loss."""
    advantages: list[float | None] | None
    """None where the token bears no loss."""
    logprob_differences: list[float | None] | None
    """Trainer's log-prob minus the engine's, in nats; None where the trainer computed none."""
    rejected_by: list[str | None] | None
    """The rule that rejected the token."""


def token_columns(row: Row, trained: TrainedRow | None) -> TokenColumns:
    """Return the columns of a row.

    Args:
        row: the row.
        trained: what the step did with its sampled tokens; None if that is not recorded.
    """
    count = len(row.tokens)
    versions: list[int | None] = [None] * count
    for span in row.spans:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    known = trained if trained is not None and _fits(trained, row.sampled_count) else None
    return TokenColumns(
        token_ids=row.tokens.tolist(),
        sampled_mask=_spread(row, [1] * row.sampled_count, 0),
        logprobs=_spread(row, row.sampled_logprobs.tolist(), None),
        versions=versions,
        loss_mask=None if known is None else _spread(row, _mask(known, row), 0),
        advantages=None if known is None else _spread(row, _advantages(known, row), None),
        logprob_differences=None if known is None else _spread(row, _differences(known, row), None),
        rejected_by=None if known is None else _spread(row, _rules(known, row), None),
    )


def trained_row(trained: TrainedCompletion | None, number: int) -> TrainedRow | None:
    """Return what the step did with a row of a completion; None if that is not recorded."""
    return trained.rows[number] if trained is not None and number < len(trained.rows) else None


def loss_counts(completion: Completion, trained: TrainedCompletion | None) -> list[int | None]:
    """Return for each row of a completion how many of its tokens bear loss; None: that is not recorded.

    Where a step's tokens are not kept, the completion's total says it if no token bears loss, or if every token does
    that is not of a discarded branch.
    """
    if trained is None:
        return [None] * len(completion.rows)
    if trained.rows:
        rows = [trained_row(trained, number) for number in range(len(completion.rows))]
        return [
            sum(_mask(known, row)) if known is not None and _fits(known, row.sampled_count) else None
            for row, known in zip(completion.rows, rows, strict=True)
        ]
    discarded = {row for branch in completion.branches if branch.discarded is not None for row in branch.rows}
    most = [0 if number in discarded else row.sampled_count for number, row in enumerate(completion.rows)]
    if trained.loss_tokens == sum(most):
        return [*most]
    return [0 if not trained.loss_tokens or number in discarded else None for number in range(len(most))]


def rejected_tokens(trained: TrainedCompletion) -> dict[str, int]:
    """Return the number of a completion's tokens that each rule rejected."""
    counts: dict[str, int] = {}
    for row in trained.rows:
        for code, rule in enumerate(row.rules, start=1):
            counts[rule] = counts.get(rule, 0) + row.rejected_by.count(code)
    return counts


def logprob_differences(trained: TrainedCompletion) -> list[float]:
    """Return the known differences between the trainer's log-probs and the engine's, of all rows."""
    found = [value for row in trained.rows for value in _floats(row.logprob_differences)]
    return [value for value in found if math.isfinite(value)]


def _spread(row: Row, values: Sequence[Any], fill: Any) -> list[Any]:
    """Put one value for each sampled token at the tokens' positions."""
    spread, at = [fill] * len(row.tokens), 0
    for start, end in row.sampled_ranges:
        spread[start:end] = values[at : at + end - start]
        at += end - start
    return spread


def _fits(trained: TrainedRow, count: int) -> bool:
    """Whether the arrays have the length that this number of sampled tokens needs."""
    return (
        len(trained.loss_mask) in (0, count)
        and len(trained.advantages) in (0, 4, 4 * count)
        and len(trained.logprob_differences) in (0, 4 * count)
        and len(trained.rejected_by) in (0, count)
        and max(trained.rejected_by, default=0) <= len(trained.rules)
    )


def _mask(trained: TrainedRow, row: Row) -> list[int]:
    return list(trained.loss_mask) or [1] * row.sampled_count


def _advantages(trained: TrainedRow, row: Row) -> list[float | None]:
    values = _floats(trained.advantages)
    if len(values) <= 1:
        values = (values or [math.nan]) * row.sampled_count
    pairs = zip(values, _mask(trained, row), strict=True)
    return [value if bears_loss and math.isfinite(value) else None for value, bears_loss in pairs]


def _differences(trained: TrainedRow, row: Row) -> list[float | None]:
    values = _floats(trained.logprob_differences) or [math.nan] * row.sampled_count
    return [value if math.isfinite(value) else None for value in values]


def _rules(trained: TrainedRow, row: Row) -> list[str | None]:
    names = (None, *trained.rules)
    return [names[code] for code in trained.rejected_by] or [None] * row.sampled_count


def _floats(data: bytes) -> list[float]:
    return array("f", data).tolist()
