"""Validity: why a reward is unknown, why a rollout failed, why an episode was truncated.

Missing rewards are never encoded as numbers. A reward is `Measured` or `Unmeasured`, and nothing turns an unmeasured
reward into a measured one.

The opposite mistake is as bad: a policy must not be able to choose to be unmeasured, because leaving a bad completion
out of its group's baseline can pay. Where only the policy's own answer cannot be judged, a reward function measures its
worst value and keeps the reason (`worst_reward`).
"""

import math
from enum import StrEnum
from numbers import Real
from typing import Final

from msgspec import Struct

from stream.causes import ErrorCause

MAX_REWARD: Final = 1e18
"""Largest absolute value of a measured reward; its square, and sums of squares, are finite in float32."""


class RewardReason(StrEnum):
    """Why a reward is unknown."""

    RAISED = "raised"  # the reward function, or get_reward, raised
    TIMEOUT = "timeout"  # it exceeded its timeout
    MISSING = "missing"  # it returned None
    NOT_FINITE = "not_finite"  # NaN or an infinity
    TOO_LARGE = "too_large"  # finite, and beyond `MAX_REWARD`
    NOT_NUMERIC = "not_numeric"  # a string, a list, or anything else that is not a number
    SHAPE = "shape"  # the number of results differs from the batch size
    BAD_REFERENCE = "bad_reference"  # the gold answer itself is unusable
    COMPONENT = "component"  # one of several required parts is unmeasured
    UNAVAILABLE = "unavailable"  # the reward model or judge could not be reached


class RolloutReason(StrEnum):
    """Why an episode failed, so that the policy's behaviour is unknown."""

    ENV_RESET = "env_reset"  # reset raised, or exceeded its timeout
    ENV_STEP = "env_step"  # a tool raised EnvironmentFailure
    ENV_TIMEOUT = "env_timeout"  # the environment hung where no error could be reported to the model
    ENGINE = "engine"  # the engine failed on this request but served others
    EFFECTS = "effects"  # its worker died after a call with effects outside, which is not made twice
    PROMPT_TOO_LONG = "prompt_too_long"  # the engine refused the prompt as too long
    SANDBOX = "sandbox"  # a sandbox was lost, or its place could not be reached


class TruncationReason(StrEnum):
    """Why an episode was truncated, from the engine's finish reason and the limits of the settings."""

    LENGTH = "length"  # the turn or the completion reached its token limit
    CONTEXT = "context"  # the model's context is full
    MAX_TURNS = "max_turns"  # rollout.max_turns
    TOOL_CALLS = "tool_calls"  # rollout.max_tool_calls
    TOOL_ERRORS = "tool_errors"  # half of rollout.max_tool_calls
    TOOL_TIME = "tool_time"  # rollout.episode_timeout_s, in tools
    WALL_CLOCK = "wall_clock"  # rollout.episode_timeout_s, outside of tools


class DropReason(StrEnum):
    """Why a group, or a row of it, is not trained although it was sampled."""

    NO_VALID_ROW = "no_valid_row"  # no row of the group is in the baseline mask
    MIN_VALID_ROWS = "min_valid_rows"  # fewer than the setting requires
    ZERO_VARIANCE = "zero_variance"  # every valid row has the same reward: no signal
    SINGLETON = "singleton"  # one valid row, with single_sample_policy "drop"
    NO_BASELINE = "no_baseline"  # the greedy completion is unmeasured
    DIFFICULTY = "difficulty"  # the mean reward of valid rows is outside the filter's bounds
    ADVANTAGE = "advantage"  # the largest advantage is outside the filter's bounds
    GRADIENT_NOT_FINITE = "gradient_not_finite"  # the batch's gradient was not finite
    OPERATOR = "operator"  # an operator dropped its dead letter


class Measured(Struct, frozen=True, tag="measured", omit_defaults=True):
    """A reward with a value, which is a finite float of at most `MAX_REWARD`."""

    value: float
    """The reward."""
    reason: RewardReason | None = None
    """Why the value is the worst one: the answer itself could not be judged. None for any other value."""
    detail: str = ""
    """The reason's text."""


class Unmeasured(Struct, frozen=True, tag="unmeasured", omit_defaults=True):
    """A reward without a value, with the reason and the error's text."""

    reason: RewardReason
    """Why there is no value."""
    detail: str = ""
    """The error's text."""
    cause: ErrorCause | None = None
    """Where user code raised or hung; None if it returned something that is no reward."""


Reward = Measured | Unmeasured

RETURNED_NONE: Final = Unmeasured(RewardReason.MISSING, "returned None")
"""The reward of a returned None."""


def worst_reward(value: float | None, reason: RewardReason, detail: str) -> Reward:
    """Return the reward of a completion that could not be judged because of what the model wrote.

    This is the only place where such a completion gets its reward. What the model causes is measured, at the worst
    value of the part, because a policy must not be able to choose to be unmeasured; what others cause (data, services,
    machines) is `Unmeasured`.

    Args:
        value: the worst value that the part can have; None: nobody has stated it, so the completion is unmeasured.
        reason: why it could not be judged; kept with the value.
        detail: the reason's text.
    """
    return Unmeasured(reason, detail) if value is None else Measured(value, reason, detail)


def measure(value: object) -> Reward:
    """Convert the result of a reward function.

    Args:
        value: any object. Numbers are Python and numpy numbers, bools, and arrays and tensors of one element.

    Returns:
        `Measured` for a number up to ± `MAX_REWARD`, else `Unmeasured` with `missing`, `not_finite`, `too_large` or
        `not_numeric`. A `Measured` keeps its reason and detail.

    Example:
        >>> measure(1)
        Measured(value=1.0)
        >>> measure(float("nan")).reason
        <RewardReason.NOT_FINITE: 'not_finite'>
    """
    if isinstance(value, Unmeasured):
        return value
    reason, detail = None, ""
    if isinstance(value, Measured):
        reason = value.reason if isinstance(value.reason, RewardReason) else None
        detail = str(value.detail) if reason else ""
        value = value.value  # its value may not be finite
    if value is None:
        return RETURNED_NONE
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
    if abs(number) > MAX_REWARD:
        return Unmeasured(RewardReason.TOO_LARGE, f"returned {number:g}; the limit is {MAX_REWARD:g}")
    return Measured(number, reason, detail)
