"""What a reward function returned, classified: each entry is a reward, or several named parts of one."""

from collections.abc import Mapping
from typing import Any

import msgspec

from envs.call import Failed, Ok, Outcome, TimedOut, describe_error
from stream.validity import Measured, Reward, RewardReason, Unmeasured, measure


class NamedRewards(msgspec.Struct, frozen=True, tag="parts"):
    """Several parts of one completion's reward, each with its own validity."""

    by_name: dict[str, Reward]


RowResult = Measured | Unmeasured | NamedRewards
"""What is known of one completion after one call."""


class CallResult(msgspec.Struct):
    """What came of one call."""

    rows: list[RowResult]
    """One for each row."""
    rows_retryable: bool = False
    """The call raised, or was ended, so that a row of it may be to blame, and the others are worth another one."""


def classify_call(outcome: Outcome, rows: int) -> CallResult:
    """What came of a call for so many rows; where it did not return in time, nobody says that it can be repeated."""
    return CallResult(classify_rows(outcome, rows), isinstance(outcome, Failed))


def classify_rows(outcome: Outcome, rows: int) -> list[RowResult]:
    """What came of one call, as one entry for each of its rows."""
    if not isinstance(outcome, Ok):
        return [failure_reward(outcome)] * rows
    values, wrong = read_values(outcome.value, rows, "one for each completion")
    if wrong:
        return [Unmeasured(RewardReason.SHAPE, wrong)] * rows
    return [_classify_row(value) for value in values]


def rewards_by_name(value: Mapping[Any, Any]) -> dict[str, Reward]:
    """A mapping's entries by name, each measured for itself."""
    return {str(key): to_reward(entry) for key, entry in value.items()}


def _classify_row(value: Any) -> RowResult:
    if not isinstance(value, Mapping):
        return to_reward(value)
    try:
        by_name = rewards_by_name(value)
    except Exception as error:  # noqa: BLE001  (a mapping of the user's runs the user's code)
        return Unmeasured(
            RewardReason.NOT_NUMERIC, f"returned {_type_description(value)}, which raised {describe_error(error)}"
        )
    return NamedRewards(by_name) if by_name else Unmeasured(RewardReason.MISSING, "returned a mapping without a part")


def is_per_turn(result: Any) -> bool:
    """A list, a tuple, or an array of one dimension; arrays of none are numbers."""
    try:
        shape = getattr(result, "shape", None)
        return isinstance(result, list | tuple) or (isinstance(shape, tuple) and len(shape) == 1)
    except Exception:  # noqa: BLE001  (attributes of user objects run their own code)
        return False


def read_values(result: Any, count: int, per: str) -> tuple[list[Any], str]:
    """The entries of a result, or what is wrong with its shape. Never cut to fit, never repeated to fill."""
    expected = f"a list of {count} numbers expected, {per}"
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
    """`measure`, for whatever user code may return: a number that cannot be read is none."""
    if isinstance(value, Measured):
        value = value.value  # user code may put anything into it
    try:
        return measure(value)
    except Exception as error:  # noqa: BLE001  (conversion runs the value's own code)
        return Unmeasured(
            RewardReason.NOT_NUMERIC, f"returned {_type_description(value)}, which raised {describe_error(error)}"
        )


def failure_reward(outcome: Failed | TimedOut) -> Unmeasured:
    """The reason why a call measured nothing."""
    if isinstance(outcome, Failed):
        return Unmeasured(RewardReason.RAISED, describe_error(outcome.error))
    return Unmeasured(RewardReason.TIMEOUT, f"did not return within {outcome.timeout_s:g} s")


def _type_description(value: object) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"
