"""The facts of validity: why a reward is not known, why a rollout failed, why an episode was cut short.

A producer never encodes a state in a number. A reward is `Measured` or `Unmeasured`, and nothing turns the second into
the first: *a number is a reward only if somebody measured it.*
"""

import math
from enum import StrEnum
from numbers import Real

from msgspec import Struct


class RewardReason(StrEnum):
    """Why nobody knows the reward."""

    RAISED = "raised"  # the reward function, or get_reward, raised
    TIMEOUT = "timeout"  # it ran past its deadline
    MISSING = "missing"  # it returned None
    NOT_FINITE = "not_finite"  # NaN or an infinity
    NOT_NUMERIC = "not_numeric"  # a string, a list, anything that is no number
    SHAPE = "shape"  # the wrong number of results for the batch it was called with
    BAD_REFERENCE = "invalid_gold"  # the gold answer itself does not parse
    COMPONENT = "component"  # one of several required parts is unmeasured
    UNAVAILABLE = "unavailable"  # the reward model, or judge, could not be reached


class RolloutReason(StrEnum):
    """Why an episode failed: nobody knows what the policy would have done."""

    ENV_RESET = "env_reset"  # reset raised, or ran past its deadline
    ENV_STEP = "env_step"  # a tool raised EnvironmentFailure
    ENV_TIMEOUT = "env_timeout"  # the environment hung where the model could not be told
    ENGINE = "engine"  # the engine failed on this request while it served others
    PROMPT_TOO_LONG = "prompt_too_long"  # the engine refused the prompt as too long


class TruncationReason(StrEnum):
    """Why an episode was cut short. From the engine's finish reason and the loop's own limits, never guessed."""

    LENGTH = "length"  # a turn, or the completion, used all its tokens
    CONTEXT = "context"  # the model's context is full
    MAX_TURNS = "max_turns"
    TOOL_CALLS = "tool_calls"
    TOOL_ERRORS = "tool_errors"
    WALL_CLOCK = "wall_clock"


class DropReason(StrEnum):
    """Why a group, or a row of it, is not trained although it came back."""

    ABORTED = "aborted"
    STALE = "stale"
    DUPLICATE = "duplicate"
    LATE = "late"
    PADDING = "padding"
    NO_VALID_ROW = "no_valid_row"  # no row of the group is in the baseline mask
    MIN_VALID_ROWS = "min_valid_rows"  # fewer than the setting asks for
    ZERO_VARIANCE = "zero_variance"  # every valid row has the same reward: no signal
    SINGLETON = "singleton"  # one valid row, under the policy "drop"
    NO_BASELINE = "no_baseline"  # the greedy completion that the others are compared with is not measured
    DIFFICULTY = "difficulty"  # the mean reward of its valid rows is out of the filter's bounds
    ADVANTAGE = "advantage"  # its largest advantage is out of the filter's bounds
    GRADIENT_NOT_FINITE = "gradient_not_finite"  # the optimizer could not step on the batch that it was part of
    OPERATOR = "operator"  # a dead letter that somebody dropped by hand


class Measured(Struct, frozen=True, tag="measured"):
    """A reward that somebody measured: always a finite float."""

    value: float


class Unmeasured(Struct, frozen=True, tag="unmeasured"):
    """A reward that nobody measured, with the reason and the error's text."""

    reason: RewardReason
    detail: str = ""


Reward = Measured | Unmeasured


def measure(value: object) -> Reward:
    """Classify what a reward function returned.

    Args:
        value: anything. Python and numpy numbers, and arrays and tensors of one element, count as numbers; bools do
            too (an exact match is a common reward).

    Returns:
        `Measured` for a finite number, else `Unmeasured` with `missing`, `not_finite` or `not_numeric`.

    Example:
        >>> measure(1)
        Measured(value=1.0)
        >>> measure(float("nan")).reason
        <RewardReason.NOT_FINITE: 'not_finite'>
    """
    if isinstance(value, Unmeasured):
        return value
    if isinstance(value, Measured):
        value = value.value  # whoever made it may not have looked
    if value is None:
        return Unmeasured(RewardReason.MISSING, "returned None")
    item = getattr(value, "item", None)
    shape = getattr(value, "shape", None)
    if callable(item) and isinstance(shape, tuple) and all(size == 1 for size in shape):
        value = item()  # numpy scalars, arrays and tensors of one element
    if not isinstance(value, Real):
        return Unmeasured(RewardReason.NOT_NUMERIC, f"returned {type(value).__name__}, not a number")
    try:
        number = float(value)
    except OverflowError:
        return Unmeasured(RewardReason.NOT_FINITE, "returned an integer beyond the range of a float")
    if not math.isfinite(number):
        return Unmeasured(RewardReason.NOT_FINITE, f"returned {number}")
    return Measured(number)
