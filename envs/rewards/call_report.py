"""What a reward function reports during a call, besides the rewards that it returns."""

import inspect
from collections.abc import Callable
from typing import Any

import msgspec

from envs.call import Failed, Ok, TimedOut
from envs.rewards.call_results import CallResult, NamedRewards, RowResult, classify_rows, failure_reward
from stream.validity import Measured, Reward, RewardReason


class CallReport:
    """Collects the reports of one call; the function gets its methods as keyword arguments.

    `set_fallback` is passed to functions that name it in their signature.

    Args:
        rows: number of completions in the call.
        on_fallback: called with every new fallback.
    """

    def __init__(self, rows: int, on_fallback: Callable[[CallResult], None] = lambda _: None) -> None:
        self.fallback: list[RowResult] | None = None
        """Results of the call if it does not end in time."""
        self._rows = rows
        self._on_fallback = on_fallback

    def kwargs(self, function: Callable[..., Any]) -> dict[str, Any]:
        """Return the keyword arguments through which a function reports."""
        return {"set_fallback": self.set_fallback} if "set_fallback" in _parameters(function) else {}

    def set_fallback(self, rewards: Any) -> None:
        """Set the rewards that count if the call passes its deadline or its process dies.

        A verifier calls it when only the answer is left to be judged. Rewards are as the function returns them; a
        number gets the reason of the failure, a `Measured` gets it only if it has a reason already.
        """
        self.fallback = [_with_reason(row, given) for row, given in _pairs(rewards, self._rows)]
        self._on_fallback(CallResult(self.fallback))


def use_fallback(fallback: list[RowResult], outcome: Failed | TimedOut) -> list[RowResult]:
    """Return the fallback of a call that did not end, with the reason why it did not."""
    failure = failure_reward(outcome)

    def explain(reward: Reward) -> Reward:
        if not isinstance(reward, Measured) or reward.reason is None:
            return reward
        detail = f"{reward.detail}: {failure.detail}" if reward.detail else failure.detail
        return Measured(reward.value, failure.reason, detail)

    return [
        NamedRewards({name: explain(reward) for name, reward in row.by_name.items()})
        if isinstance(row, NamedRewards)
        else explain(row)
        for row in fallback
    ]


def _pairs(rewards: Any, rows: int) -> list[tuple[RowResult, Any]]:
    """Return each result with what the function gave for it."""
    results = classify_rows(Ok(rewards), rows)
    given = list(rewards) if isinstance(rewards, list | tuple) and len(rewards) == rows else [None] * rows
    return list(zip(results, given, strict=True))


def _with_reason(row: RowResult, given: Any) -> RowResult:
    """Mark a plain number as the value of an answer that could not be judged."""
    if isinstance(row, Measured) and not isinstance(given, Measured):
        return msgspec.structs.replace(row, reason=RewardReason.TIMEOUT)
    return row


def _parameters(function: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a C function without a signature
        return set()
