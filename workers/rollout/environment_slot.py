"""Slots: one environment instance each, reused from episode to episode, every call into it bounded in time.

Outcomes are values. A tool's answer or its error is text for the model; where nobody knows what the policy would have
done there is a `Failure`. After a failure, a deadline or a cancelled call the instance is not trusted again: it is
closed in the background, and the slot makes a new one at its next reset.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import anyio
import msgspec
import structlog

from envs.call import (
    CallRunner,
    Failed,
    Ok,
    Outcome,
    TimedOut,
    describe_error,
    describe_failure,
    is_async,
    replace_surrogates,
)
from envs.contract import Observation, is_observation
from envs.factory import EnvironmentFactory
from envs.rewards import environment_reward
from envs.snapshot import freeze
from envs.tools import ToolArgumentError, bind_arguments
from stream.errors import EnvironmentFailure
from stream.records import Failure, Message, RewardPart
from stream.validity import RolloutReason, TruncationReason, Unmeasured
from workers.rollout.tool_formats.parsed_turn import ToolCall
from workers.rollout.tool_result import ToolResult, returning_tool_result

log = structlog.get_logger()

MAX_SNAPSHOT_BYTES = 1_000_000
"""Size limit of one frozen environment; its largest attributes are omitted beyond it."""

T = TypeVar("T")

_CLOSE_TIMEOUT_S = 10.0


class EnvironmentSlot:
    """One environment instance at a time.

    Args:
        name: the environment's name in the settings.
        factory: makes instances.
        caller: runs their code.
    """

    def __init__(self, name: str, factory: EnvironmentFactory, caller: CallRunner) -> None:
        self.name = name
        self.needs_replacement = False
        self._factory = factory
        self._caller = caller
        self._environment: Any = None
        self._tools = frozenset(tool.name for tool in factory.tools)
        self._sync_tools_lock = anyio.Lock(fast_acquire=True)

    @property
    def has_tools(self) -> bool:
        """The model can call something."""
        return bool(self._tools)

    @property
    def runs_own_loop(self) -> bool:
        """The environment leads its episodes, and asks an endpoint for each turn."""
        return bool(self._factory.runs_own_loop)

    @property
    def has_reward(self) -> bool:
        """The environment measures a reward itself."""
        return bool(self._factory.has_reward)

    async def reset(self, fields: dict[str, Any], seed: int, index: int, timeout_s: float) -> Observation | Failure:
        """Begin an episode, with a new instance where there is none to reuse.

        Making an instance and resetting it may each take `timeout_s`.
        """
        if self._environment is None:
            outcome_of_make = await self._call(self._factory.make, {}, timeout_s)
            if not isinstance(outcome_of_make, Ok):
                return self._failure(RolloutReason.ENV_RESET, "making it", outcome_of_make)
            self._environment = outcome_of_make.value
        arguments = self._factory.reset_arguments(self._environment, fields, seed, index)
        outcome = await self._call(self._environment.reset, arguments, timeout_s)
        if not isinstance(outcome, Ok):
            return self._failure(RolloutReason.ENV_RESET, "reset", outcome)
        return self._validate_observation(outcome.value)

    async def call_tool(self, call: ToolCall, timeout_s: float) -> ToolResult | Failure:
        """Call a tool: its answer, or for the model to read what went wrong.

        Tools of one turn may run at the same time if they are async; synchronous ones take turns, in order, since no
        class was promised that two threads would be in it at once.
        """
        if call.name not in self._tools:
            known = ", ".join(sorted(self._tools))
            return ToolResult(
                replace_surrogates(f"Error: there is no tool {call.name!r}; the tools are: {known}"), is_error=True
            )
        try:
            method, arguments = self._bind_call(call)
        except ToolArgumentError as wrong:
            return ToolResult(replace_surrogates(f"Error: {wrong}"), is_error=True)
        if is_async(method):
            outcome = await self._call(returning_tool_result(method), arguments, timeout_s)
        else:
            async with self._sync_tools_lock:
                outcome = await self._call(returning_tool_result(method), arguments, timeout_s)
        match outcome:
            case Ok(ToolResult() as result):
                return result
            case Ok():
                raise AssertionError("a tool's result is converted in its own thread")
            case Failed(error) if _is_environment_failure(error):
                return self._failure(RolloutReason.ENV_STEP, call.name, outcome)
            case Failed(error):
                return ToolResult(f"Error: {describe_error(error)}", is_error=True)
            case TimedOut(seconds):
                return ToolResult(f"Error: {call.name} did not answer within {seconds:g} s", is_error=True)

    def _bind_call(self, call: ToolCall) -> tuple[Callable[..., Any], dict[str, Any]]:
        """What to call, and with what. Arguments of a declared tool are checked by whoever declared it."""
        if self._factory.declares_tools:
            return self._environment.call_tool, {"name": call.name, "arguments": call.arguments}
        method = getattr(self._environment, call.name)
        return method, bind_arguments(method, call.arguments)

    async def run_episode(
        self, endpoint: str, sampling: dict[str, Any], timeout_s: float
    ) -> Failure | TruncationReason | None:
        """Have an environment lead its episode; None where it came to its end."""
        outcome = await self._call(
            self._environment.run_episode, {"endpoint": endpoint, "sampling": sampling}, timeout_s
        )
        match outcome:
            case Ok():
                return None
            case TimedOut():
                return TruncationReason.WALL_CLOCK
            case Failed():
                return self._failure(RolloutReason.ENV_STEP, "leading the episode", outcome)

    async def reward(self, timeout_s: float, messages: Sequence[Message] = ()) -> list[RewardPart]:
        """What `get_reward` measured, or did not, after this conversation."""
        parts = await self._await_or_replace(environment_reward(self._environment, timeout_s, self._caller, messages))
        self.needs_replacement |= any(isinstance(part.reward, Unmeasured) for part in parts)
        return parts

    async def freeze(self, max_bytes: int, timeout_s: float) -> bytes | Failure:
        """The instance's attributes as bytes, before anybody can reset it."""
        outcome = await self._call(freeze, {"env": self._environment, "max_bytes": max_bytes}, timeout_s)
        if isinstance(outcome, Ok):
            return bytes(outcome.value)
        reason = RolloutReason.ENV_TIMEOUT if isinstance(outcome, TimedOut) else RolloutReason.ENV_STEP
        return self._failure(reason, "taking its snapshot", outcome)

    async def close(self) -> None:
        """Call the instance's `close`, if it has one, for a limited time; what goes wrong is logged."""
        environment, self._environment = self._environment, None
        self.needs_replacement = False
        close = getattr(environment, "close", None)
        if not callable(close):
            return
        outcome = await self._caller.call(close, {}, _CLOSE_TIMEOUT_S)
        if not isinstance(outcome, Ok):
            log.warning("environment.close_failed", environment=self.name, why=describe_failure(outcome))

    async def _call(self, function: Callable[..., Any], arguments: dict[str, Any], timeout_s: float) -> Outcome:
        outcome = await self._await_or_replace(self._caller.call(function, arguments, timeout_s))
        self.needs_replacement |= isinstance(outcome, TimedOut)
        return outcome

    async def _await_or_replace(self, call: Awaitable[T]) -> T:
        """Await; if that is cut short, the instance may still be busy with it."""
        try:
            return await call
        except BaseException:
            self.needs_replacement = True
            raise

    def _failure(self, reason: RolloutReason, what: str, outcome: Outcome) -> Failure:
        self.needs_replacement = True
        return Failure(reason=reason, detail=f"{self.name}: {what}: {describe_failure(outcome)}")

    def _validate_observation(self, value: Any) -> Observation | Failure:
        """What `reset` returned, if a prompt can end with it."""
        if isinstance(value, str):
            return replace_surrogates(value)
        try:
            msgspec.msgpack.encode(value)
            fits = is_observation(value)
        except (TypeError, ValueError, OverflowError, RecursionError):
            fits = False
        if fits:
            observation: Observation = value
            return observation
        kind = type(value).__name__
        wrong = Failed(TypeError(f"{kind} returned; None, a string, or a list of plain content parts is expected"))
        return self._failure(RolloutReason.ENV_RESET, "reset", wrong)


def _is_environment_failure(error: BaseException) -> bool:
    """An `EnvironmentFailure`, also one inside the group that a task group raises."""
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(EnvironmentFailure) is not None
    return isinstance(error, EnvironmentFailure)
