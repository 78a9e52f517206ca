"""How the rewards of steps become an episode's reward, in all adapters of environments that reward steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

from stream.errors import ReferenceNotFoundError
from stream.validity import RewardReason, Unmeasured

AggregationMethod = Literal["sum", "last", "max"]
NoStep = float | Literal["invalid"]
"""Reward of an episode without a step; `invalid`: such an episode has no reward, so the completion is invalid."""


@dataclass(frozen=True, slots=True)
class RewardAggregation:
    """Aggregates the rewards of an episode's steps.

    Example:
        >>> RewardAggregation.from_options("sum").aggregate([1.0, 0.25])
        1.25
        >>> RewardAggregation.from_options("last", no_step=-1.0).aggregate([])
        -1.0
    """

    method: AggregationMethod
    no_step: NoStep

    @classmethod
    def from_options(cls, reward: str, no_step: float | str | None = None) -> "RewardAggregation":
        """Make the aggregation from an adapter's options.

        Args:
            reward: `sum`, `last` or `max`.
            no_step: a finite number or `invalid`. None means 0.0, the empty sum; `last` and `max` need another value,
                because an empty list has no last and no largest element.

        Raises:
            ReferenceNotFoundError: an option has another value, or `no_step` is None where it is needed.
        """
        if reward not in get_args(AggregationMethod):
            raise ReferenceNotFoundError(f"reward = {reward!r}; it may be 'sum', 'last' or 'max'")
        if no_step is None and reward != "sum":
            raise ReferenceNotFoundError(
                f"reward = {reward!r} needs no_step, the reward of an episode in which the model takes no step: a "
                "number, preferably not above the reward of a bad step, or 'invalid'"
            )
        value = 0.0 if no_step is None else no_step
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number and value != "invalid":
            raise ReferenceNotFoundError(f"no_step = {no_step!r}; it may be a finite number or 'invalid'")
        return cls(cast("AggregationMethod", reward), float(value) if is_number else "invalid")

    def aggregate(self, rewards: Sequence[float | None]) -> float | Unmeasured:
        """Return an episode's reward.

        Args:
            rewards: of the steps, in order; None for a step whose reward the environment did not measure. A sum or a
                maximum over such a step is unknown.
        """
        if not rewards:
            if self.no_step == "invalid":
                return Unmeasured(RewardReason.MISSING, "no reward: the model took no step, and no_step is 'invalid'")
            return self.no_step
        considered = rewards[-1:] if self.method == "last" else rewards
        numbers = [reward for reward in considered if reward is not None]
        if len(numbers) < len(considered):
            nulls = f"{len(considered) - len(numbers)} of {len(considered)} steps have null as their reward"
            return Unmeasured(RewardReason.MISSING, f"{nulls}; JSON has null for NaN and infinity, too")
        return float(max(numbers) if self.method == "max" else sum(numbers))
