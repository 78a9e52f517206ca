"""The parts of a completion's reward, merged into one."""

import math
from collections.abc import Sequence

from stream.records import RewardPart
from stream.validity import Measured, Reward, RewardReason, Unmeasured


def merge_parts(parts: Sequence[RewardPart]) -> Reward:
    """The weighted sum of the parts; unmeasured as soon as one of them is.

    A part of weight 0 is required like any other: what is asked for must be known.

    Example:
        >>> merge([Part(name="env", reward=Measured(1.0)), Part(name="short", reward=Measured(0.5), weight=0.2)])
        Measured(value=1.1)
    """
    if not parts:
        return Unmeasured(RewardReason.MISSING, "nothing measured this completion")
    unmeasured = [part for part in parts if isinstance(part.reward, Unmeasured)]
    if unmeasured:
        if len(parts) == 1:
            return parts[0].reward
        return Unmeasured(RewardReason.COMPONENT, "; ".join(_describe_part(part) for part in unmeasured))
    total = sum(part.weight * part.reward.value for part in parts if isinstance(part.reward, Measured))
    if not math.isfinite(total):
        return Unmeasured(RewardReason.NOT_FINITE, "the weighted sum of the parts is beyond the range of a float")
    return Measured(float(total))


def _describe_part(part: RewardPart) -> str:
    if not isinstance(part.reward, Unmeasured):
        return part.name
    turn = "" if part.turn is None else f" (turn {part.turn})"
    return f"{part.name}{turn}: {part.reward.reason} {part.reward.detail}".rstrip()
