"""What a reward function exchanges with its caller, besides its arguments and the rewards that it returns.

It reports metrics, columns and a fallback (`CallReport`), and reads how far training has come (`TrainerState`), for
rewards that change during training.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import msgspec
from msgspec import Struct

from envs.call import Failed, Ok, TimedOut, filter_kwargs, replace_surrogates
from envs.rewards.call_results import CallResult, NamedRewards, RowResult, classify_rows, failure_reward
from stream.records import Group
from stream.validity import Measured, Reward, RewardReason


class TrainerState(Struct, frozen=True):
    """TRL's `trainer_state`, as far as a scorer knows it: how far training had come when the group was sampled.

    It follows from the group, so a group that is scored again gets the same rewards.
    """

    global_step: int = 0
    """The newest policy version that sampled a token of the group."""
    epoch: float = 0.0
    """Completed passes over the data when the prompt was fed."""

    @classmethod
    def of_group(cls, group: Group) -> "TrainerState":
        """Return the state of training when a group was sampled."""
        versions = (s.version for c in group.completions for row in c.rows for s in row.spans)
        return cls(max(versions, default=0), float(group.prompt.epoch))

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"trainer_state has {', '.join(self.__struct_fields__)}; a scorer does not know {name!r}")


REPORT_PARAMETERS: Final = ("trainer_state", "log_extra", "log_metric", "set_fallback")
"""Parameters of a reward function that are neither lists of completions nor columns."""

_encoder = msgspec.msgpack.Encoder(enc_hook=str)


class CallReport:
    """Collects the reports of one call; the function gets its methods as keyword arguments.

    Args:
        rows: number of completions in the call.
        on_fallback: called with the result that each `set_fallback` gives the call.
    """

    def __init__(self, rows: int, on_fallback: Callable[[CallResult], None] = lambda _: None) -> None:
        self.fallback: list[RowResult] | None = None
        """Results of the call if it does not return, one for each completion; None if the function has set none."""
        self._rows = rows
        self._on_fallback = on_fallback
        self._metrics: dict[str, list[float]] = {}
        self._extra: dict[str, list[Any]] = {}

    def kwargs(self, function: Callable[..., Any], state: TrainerState) -> dict[str, Any]:
        """Return the keyword arguments in `REPORT_PARAMETERS` that a function accepts.

        As in TRL, `**kwargs` accepts all of them but `set_fallback`, which the function has to name.
        """
        available = {"trainer_state": state, "log_extra": self.log_extra, "log_metric": self.log_metric}
        named = {"set_fallback": self.set_fallback} if "set_fallback" in _parameters(function) else {}
        return filter_kwargs(function, available) | named

    def result(self, rows: list[RowResult]) -> CallResult:
        """Return the call's result with everything that was logged."""
        return CallResult(rows, dict(self._metrics), dict(self._extra))

    def log_metric(self, name: str, value: float) -> None:
        """Log a number, whose mean is the metric `logged/NAME` of the step; one that is not finite is left out."""
        if math.isfinite(number := float(value)):
            self._metrics.setdefault(replace_surrogates(str(name)), []).append(number)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Log a value for each completion of the call, stored with it as `extra[column]`.

        Raises:
            ValueError: the number of values is not the number of completions.
        """
        plain = [_plain(value) for value in values]
        if len(plain) != self._rows:
            raise ValueError(f"log_extra({column!r}) got {len(plain)} values for {self._rows} completions")
        self._extra[replace_surrogates(str(column))] = plain

    def set_fallback(self, rewards: Any) -> None:
        """Set the rewards that count if the call passes its deadline or its process dies.

        A verifier calls it when only the model's answer is left to be judged, so that an answer that breaks it is
        measured all the same.

        Args:
            rewards: in any form that the function may return. If they count, a number gets the failure as its reason;
                a `Measured` gets it only if it has a reason already.
        """
        self.fallback = [_with_reason(row, given) for row, given in _pairs(rewards, self._rows)]
        self._on_fallback(self.result(self.fallback))


def use_fallback(fallback: CallResult, outcome: Failed | TimedOut) -> CallResult:
    """Return the fallback of a call that did not return, with the reason why it did not."""
    failure = failure_reward(outcome)

    def explain(reward: Reward) -> Reward:
        if not isinstance(reward, Measured) or reward.reason is None:
            return reward
        detail = f"{reward.detail}: {failure.detail}" if reward.detail else failure.detail
        return Measured(reward.value, failure.reason, detail)

    rows = [
        NamedRewards({name: explain(reward) for name, reward in row.by_name.items()})
        if isinstance(row, NamedRewards)
        else explain(row)
        for row in fallback.rows
    ]
    return msgspec.structs.replace(fallback, rows=rows)


def _plain(value: Any) -> Any:
    """Return a value as plain msgpack data; its text if that is impossible."""
    try:
        return msgspec.msgpack.decode(_encoder.encode(value))
    except Exception:  # noqa: BLE001  (a user's object)
        return replace_surrogates(str(value))


def _pairs(rewards: Any, rows: int) -> list[tuple[RowResult, Any]]:
    """Return each result together with the value that the function gave for it; None if there is no such value."""
    results = classify_rows(Ok(rewards), rows)
    given = list(rewards) if isinstance(rewards, list | tuple) and len(rewards) == rows else [None] * rows
    return list(zip(results, given, strict=True))


def _with_reason(row: RowResult, given: Any) -> RowResult:
    """Give the reward of a plain number a reason, so that `use_fallback` replaces it with the failure's."""
    if isinstance(row, Measured) and not isinstance(given, Measured):
        return msgspec.structs.replace(row, reason=RewardReason.TIMEOUT)
    return row


def _parameters(function: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a C function without a signature
        return set()
