"""Classify what a reward function returned: for each completion a reward, or several named ones."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from envs.call import Failed, Ok, Outcome, TimedOut, describe_error, outcome_cause, replace_surrogates
from stream.validity import Measured, Reward, RewardReason, Unmeasured, measure


class NamedRewards(msgspec.Struct, frozen=True, tag="parts"):
    """Several named rewards of one completion, each with its own validity."""

    by_name: dict[str, Reward]


RowResult = Measured | Unmeasured | NamedRewards
"""Result for one completion."""


class CallResult(msgspec.Struct):
    """The results of one call of a reward function."""

    rows: list[RowResult]
    """One result for each completion of the call."""
    metrics: dict[str, list[float]] = msgspec.field(default_factory=dict)
    """Numbers that the function passed to `log_metric`, by name."""
    extra: dict[str, list[Any]] = msgspec.field(default_factory=dict)
    """Columns that the function passed to `log_extra`, each with one value for each completion of the call."""


def join_results(results: Sequence[CallResult]) -> CallResult:
    """Join the results of calls for successive completions. Where a call did not log a column, the column is None."""
    joined = CallResult([row for result in results for row in result.rows])
    for name in dict.fromkeys(name for result in results for name in result.metrics):
        joined.metrics[name] = [value for result in results for value in result.metrics.get(name, ())]
    for column in dict.fromkeys(column for result in results for column in result.extra):
        columns = (result.extra.get(column, [None] * len(result.rows)) for result in results)
        joined.extra[column] = [value for values in columns for value in values]
    return joined


def classify_rows(outcome: Outcome, rows: int) -> list[RowResult]:
    """Return one result for each completion of a call.

    Args:
        outcome: how the call ended.
        rows: number of completions in the call.
    """
    if not isinstance(outcome, Ok):
        return [failure_reward(outcome)] * rows
    values, problem = read_values(outcome.value, rows, "one for each completion")
    if problem:
        return [Unmeasured(RewardReason.SHAPE, problem)] * rows
    return [_classify_row(value) for value in values]


def _classify_row(value: Any) -> RowResult:
    if not isinstance(value, Mapping):
        return to_reward(value)
    by_name = rewards_by_name(value)
    if isinstance(by_name, Unmeasured):
        return by_name
    return NamedRewards(by_name) if by_name else Unmeasured(RewardReason.MISSING, "returned an empty mapping")


def rewards_by_name(value: Mapping[Any, Any]) -> dict[str, Reward] | Unmeasured:
    """Convert each entry of a mapping to a reward; `Unmeasured` if the mapping itself cannot be read."""
    try:
        return {replace_surrogates(str(key)): to_reward(entry) for key, entry in value.items()}
    except Exception as error:  # noqa: BLE001  (the mapping may be a user's class)
        return _unreadable(value, error)


def is_per_turn(result: Any) -> bool:
    """Return whether a result has one number for each turn: a list, a tuple or a 1-d array. 0-d arrays are numbers."""
    try:
        shape = getattr(result, "shape", None)
        return isinstance(result, list | tuple) or (isinstance(shape, tuple) and len(shape) == 1)
    except Exception:  # noqa: BLE001  (attributes of user objects run their own code)
        return False


def read_values(result: Any, count: int, per: str) -> tuple[list[Any], str]:
    """Return the values of a result. Values are never truncated or repeated to fit.

    Args:
        result: a list, tuple, array, tensor or series.
        count: expected number of values.
        per: what each value stands for, for the message, such as `one for each completion`.

    Returns:
        The values, and an empty text; or no values, and what is wrong with the shape of the result.
    """
    try:
        return _read_values(result, count, f"a list of {count} numbers expected, {per}")
    except Exception as error:  # noqa: BLE001  (the list may be a user's class)
        return [], _unreadable(result, error).detail


def _read_values(result: Any, count: int, expected: str) -> tuple[list[Any], str]:
    if not isinstance(result, list | tuple):
        shape = getattr(result, "shape", None)  # numpy arrays, tensors, series
        if not isinstance(shape, tuple) or not shape or not callable(getattr(result, "tolist", None)):
            return [], f"returned {_type_description(result)}; {expected}"
        if len(shape) > 1:
            return [], f"returned an array of shape {tuple(shape)}; {expected}"
        result = result.tolist()
    if len(result) != count:
        return [], f"returned {len(result)} values; {expected}"
    nested = next((v for v in result if isinstance(v, list | tuple) or getattr(v, "shape", ()) not in ((), None)), None)
    if nested is not None:
        return [], f"returned {_type_description(nested)} within the list; {expected}"
    return list(result), ""


def to_reward(value: Any) -> Reward:
    """Convert any returned value to a reward: `Unmeasured` unless it is a finite number or a reward already."""
    try:
        reward = measure(value)
        return _storable(reward) if reward.detail or isinstance(reward, Unmeasured) else reward
    except Exception as error:  # noqa: BLE001  (conversion runs the value's own code)
        return _unreadable(value, error)


def failure_reward(outcome: Failed | TimedOut) -> Unmeasured:
    """Return the reward of a call that failed or timed out."""
    if isinstance(outcome, Failed):
        return Unmeasured(RewardReason.RAISED, describe_error(outcome.error), outcome_cause(outcome))
    return Unmeasured(RewardReason.TIMEOUT, f"did not return within {outcome.timeout_s:g} s", outcome_cause(outcome))


def _storable(reward: Reward) -> Reward:
    """Make a reward that a function may have constructed itself fit for a record.

    An unknown reason becomes part of the text: `Unmeasured("the judge is down")` gets the reason `raised`.
    """
    detail = replace_surrogates(str(reward.detail))
    if isinstance(reward, Measured):
        return msgspec.structs.replace(reward, detail=detail)
    try:
        return Unmeasured(RewardReason(reward.reason), detail, reward.cause)
    except ValueError:
        unknown = replace_surrogates(str(reward.reason))
        return Unmeasured(RewardReason.RAISED, f"{unknown}: {detail}" if detail else unknown, reward.cause)


def _unreadable(value: object, error: Exception) -> Unmeasured:
    """Return the reward of a value whose own code raised when it was read."""
    return Unmeasured(
        RewardReason.NOT_NUMERIC, f"returned {_type_description(value)}, which raised {describe_error(error)}"
    )


def _type_description(value: object) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"
