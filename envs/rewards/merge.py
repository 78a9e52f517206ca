"""Merge the parts of a completion's reward into one reward."""

import math
from collections.abc import Sequence

from stream.records import RewardPart
from stream.validity import MAX_REWARD, Measured, Reward, RewardReason, Unmeasured


def merge_parts(parts: Sequence[RewardPart]) -> Reward:
    """Return the weighted sum of the parts, or `Unmeasured` if any part is unmeasured.

    A part with weight 0 must be measured too. A weighted part, or a sum, beyond `MAX_REWARD` is unmeasured. The reasons
    of measured parts are kept.

    Example:
        >>> merge([Part(name="env", reward=Measured(1.0)), Part(name="short", reward=Measured(0.5), weight=0.2)])
        Measured(value=1.1)
    """
    if not parts:
        return Unmeasured(RewardReason.MISSING, "no reward was measured for this completion")
    unmeasured = [part for part in parts if isinstance(part.reward, Unmeasured)]
    if unmeasured:
        if len(parts) == 1:
            return parts[0].reward
        return Unmeasured(RewardReason.COMPONENT, "; ".join(_describe_part(part) for part in unmeasured))
    measured = [(part, part.reward) for part in parts if isinstance(part.reward, Measured)]
    weighted = [part.weight * reward.value for part, reward in measured]
    total = sum(weighted)
    if not math.isfinite(total):
        return Unmeasured(RewardReason.NOT_FINITE, "the weighted sum of the parts is not finite")
    largest = max(map(abs, [*weighted, total]))
    if largest > MAX_REWARD:
        return Unmeasured(
            RewardReason.TOO_LARGE, f"a weighted part, or their sum, is {largest:g}; the limit is {MAX_REWARD:g}"
        )
    explained = [(part, reward) for part, reward in measured if reward.reason is not None]
    detail = "; ".join(f"{part.name}: {reward.detail}" for part, reward in explained)
    return Measured(float(total), explained[0][1].reason if explained else None, detail)


def _describe_part(part: RewardPart) -> str:
    if not isinstance(part.reward, Unmeasured):
        return part.name
    turn = "" if part.turn is None else f" (turn {part.turn})"
    return f"{part.name}{turn}: {part.reward.reason} {part.reward.detail}".rstrip()
