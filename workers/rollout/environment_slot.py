"""Slots: one environment instance each, reused from episode to episode, with a deadline around every call into it.

Outcomes are values. A tool's result or its error is text for the model; a `Failure` ends the episode, because the
environment failed and not the policy. After a failure, a timeout or a cancelled call the instance is not reused: it is
closed in the background, and the slot makes a new one at its next reset.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import anyio
import structlog

from envs.call import (
    Call,
    CallRunner,
    Failed,
    Ok,
    Outcome,
    TimedOut,
    TimedOutcome,
    call_inline,
    describe_error,
    describe_failure,
    is_async,
    outcome_cause,
    replace_surrogates,
)
from envs.contract import Observation, is_done, is_observation, is_response, stated_timeout_s
from envs.factory import EnvironmentFactory
from envs.rewards.parts import reward_call, reward_parts
from envs.snapshot import freeze
from envs.tools import ToolArgumentError, bind_arguments
from stream.causes import ErrorCause
from stream.errors import EnvironmentFailure
from stream.records import Failure, Message, RewardPart
from stream.validity import RolloutReason, TruncationReason, Unmeasured
from workers.rollout.messages import is_plain_data, response_arguments, to_messages
from workers.rollout.sandboxes import NOT_STARTED, LeasedSandboxes, sandbox_failure
from workers.rollout.tool_formats.parsing import ToolCall
from workers.rollout.tool_result import ToolResult, call_async_tool, call_tool

log = structlog.get_logger()

_CLOSE_TIMEOUT_S = 10.0


class EnvironmentSlot:
    """One environment instance at a time.

    Args:
        name: the environment's name in the settings.
        factory: makes instances.
        calls: calls the methods of the instances, each with a deadline.

    Attributes:
        factory: what makes the instances, and knows what their class declares.
        needs_replacement: the instance must not be reused.
    """

    def __init__(self, name: str, factory: EnvironmentFactory, calls: CallRunner) -> None:
        self.name = name
        self.needs_replacement = False
        self.factory = factory
        self._calls = calls
        self._environment: Any = None
        self._sandboxes: LeasedSandboxes | None = None
        self._tools = frozenset(tool.name for tool in factory.tools)

    @property
    def has_tools(self) -> bool:
        """The environment has tools for the model."""
        return bool(self._tools)

    @property
    def responds(self) -> bool:
        """The environment answers turns without a tool call."""
        return bool(self.factory.responds)

    @property
    def instance(self) -> object:
        """The environment's instance; None before the first reset, and after `close`."""
        return self._environment

    @property
    def runs_own_loop(self) -> bool:
        """The environment runs its episodes itself, and asks an endpoint for each turn of the model."""
        return bool(self.factory.runs_own_loop)

    @property
    def uses_sandboxes(self) -> bool:
        """The environment's `reset` gets the sandboxes of the episode."""
        return bool(self.factory.uses_sandboxes)

    @property
    def episode_timeout_s(self) -> float | None:
        """Deadline of this episode, if the environment states one."""
        return getattr(self._environment, "episode_timeout_s", None) if self.factory.states_timeouts else None

    @property
    def has_reward(self) -> bool:
        """The environment measures a reward itself."""
        return bool(self.factory.has_reward)

    async def reset(self, fields: dict[str, Any], seed: int, index: int, timeout_s: float) -> Observation | Failure:
        """Start an episode, in a new instance if there is none to reuse.

        Args:
            fields: arguments that the environment's `reset` may ask for.
            seed: the group's seed.
            index: position of the completion within its group.
            timeout_s: deadline for making an instance, and again for resetting it.
        """
        if self._environment is None:
            created = await self._call(self.factory.make, {}, timeout_s)
            if not isinstance(created, Ok):
                return self._failure(RolloutReason.ENV_RESET, "creation", created)
            self._environment = created.value
        arguments = self.factory.reset_arguments(self._environment, fields, seed, index)
        outcome = await self._call(self._environment.reset, arguments, self._limit_s("reset", timeout_s))
        if not isinstance(outcome, Ok):
            failure = self._failure(RolloutReason.ENV_RESET, "reset", outcome)
            if (error := sandbox_failure(outcome)) is not None and error.kind in NOT_STARTED:
                raise error
            return failure
        return self._validate_observation(outcome.value)

    async def reset_with(
        self, sandboxes: LeasedSandboxes, fields: dict[str, Any], seed: int, index: int, timeout_s: float
    ) -> Observation | Failure:
        """Start an episode of an environment that opens sandboxes, when it is the turn of one more to start.

        Args:
            sandboxes: of this episode.
            fields: as for `reset`.
            seed: as for `reset`.
            index: as for `reset`.
            timeout_s: as for `reset`; the time for starting one sandbox comes on top.

        Raises:
            SandboxFailure: a sandbox could not be started, so the prompt can be tried again later.
        """
        self._sandboxes = sandboxes
        async with sandboxes.starting():
            limit_s = timeout_s + sandboxes.provider.options.create_timeout_s
            return await self.reset({**fields, "sandboxes": sandboxes}, seed, index, limit_s)

    async def call_tools(self, calls: Sequence[ToolCall], timeout_s: float) -> list[ToolResult | Failure]:
        """Call the tools of one turn, and return the results, or the errors that the model reads, in the same order.

        Async tools run concurrently. Synchronous ones run in their order in one thread, since most classes do not
        expect two threads at a time.
        """
        results: dict[int, ToolResult | Failure] = {}
        in_thread: list[tuple[int, Call]] = []
        on_loop: list[tuple[int, Call]] = []
        for position, call in enumerate(calls):
            prepared = self._prepare(call)
            if isinstance(prepared, ToolResult):
                results[position] = prepared
            else:
                (on_loop if prepared[0] is call_async_tool else in_thread).append((position, prepared))

        async def run(batch: Sequence[tuple[int, Call]]) -> None:
            limit_s = max(self._limit_s(calls[position].name, timeout_s) for position, _ in batch)
            outcomes = await self._call_in_order([call for _, call in batch], limit_s)
            for (position, _), (outcome, seconds) in zip(batch, outcomes, strict=True):
                results[position] = self._to_result(calls[position], outcome, seconds)

        batches = [[call] for call in on_loop] + ([in_thread] if in_thread else [])
        if len(batches) == 1:  # a task group would cost more than most calls
            await run(batches[0])
        else:
            async with anyio.create_task_group() as tasks:
                for batch in batches:
                    tasks.start_soon(run, batch)
        return [results[position] for position in range(len(calls))]

    async def call_tool(self, call: ToolCall, timeout_s: float) -> ToolResult | Failure:
        """Call one tool, as `call_tools` does."""
        (result,) = await self.call_tools([call], timeout_s)
        return result

    def _prepare(self, call: ToolCall) -> ToolResult | Call:
        """Return the function to call and its arguments, or the error that the model reads."""
        if call.name not in self._tools:
            known = ", ".join(sorted(self._tools))
            text = f"Error: there is no tool {call.name!r}; the tools are: {known}"
            return ToolResult(replace_surrogates(text), is_error=True)
        try:
            method, arguments = self._bind_call(call)
        except ToolArgumentError as mismatch:
            return ToolResult(replace_surrogates(f"Error: {mismatch}"), is_error=True)
        return call_async_tool if is_async(method) else call_tool, {"method": method, "arguments": arguments}

    def _to_result(self, call: ToolCall, outcome: Outcome, seconds: float) -> ToolResult | Failure:
        """Return what the model reads after a call."""
        match outcome:
            case Ok(ToolResult() as result):
                result.seconds = seconds
                return result
            case Ok():
                raise AssertionError("call_tool converts every result")
            case Failed(error) if _is_environment_failure(error):
                return self._failure(RolloutReason.ENV_STEP, call.name, outcome)
            case Failed(error):
                text = f"Error: {describe_error(error)}"
                return ToolResult(text, is_error=True, seconds=seconds, cause=self._tool_cause(call.name, outcome))
            case TimedOut(limit_s):
                text = f"Error: {call.name} did not answer within {limit_s:g} s"
                return ToolResult(text, is_error=True, seconds=seconds, cause=self._tool_cause(call.name, outcome))

    def _tool_cause(self, tool: str, outcome: Outcome) -> ErrorCause | None:
        return outcome_cause(outcome, f"environment {self.name}, tool {tool}")

    async def respond(self, text: str, messages: Sequence[Message], timeout_s: float) -> list[Message] | Failure | None:
        """Return the messages with which the environment answers a turn without a tool call; None ends the episode.

        Args:
            text: text of the turn, without its reasoning.
            messages: the conversation after the prompt; an environment that names this parameter gets a copy.
            timeout_s: deadline of the call.
        """
        method = self._environment.respond
        arguments = response_arguments(method, text, messages)
        outcome = await self._call(method, arguments, self._limit_s("respond", timeout_s))
        if isinstance(outcome, TimedOut):
            return self._failure(RolloutReason.ENV_TIMEOUT, "respond", outcome)
        if not isinstance(outcome, Ok):
            return self._failure(RolloutReason.ENV_STEP, "respond", outcome)
        value = outcome.value
        if not is_plain_data(value) or not is_response(value):
            error = TypeError(
                f"{type(value).__name__} returned; None, a string, a list of content parts, or a list of messages with "
                "roles other than assistant and tool is expected, all of plain data"
            )
            return self._failure(RolloutReason.ENV_STEP, "respond", Failed(error))
        return to_messages(value)

    async def is_done(self, timeout_s: float) -> bool | Failure:
        """Return whether the environment has ended the episode: its attribute or property `done`."""
        if isinstance(getattr(type(self._environment), "done", None), property):
            outcome = await self._call(is_done, {"env": self._environment}, timeout_s)
        else:
            outcome = call_inline(is_done, {"env": self._environment})  # a `__getattr__` may fail
        if isinstance(outcome, Ok):
            return bool(outcome.value)
        reason = RolloutReason.ENV_TIMEOUT if isinstance(outcome, TimedOut) else RolloutReason.ENV_STEP
        return self._failure(reason, "done", outcome)

    def _bind_call(self, call: ToolCall) -> tuple[Callable[..., Any], dict[str, Any]]:
        """Return the method and its arguments. An environment that declares its tools checks their arguments itself."""
        if self.factory.declares_tools:
            return self._environment.call_tool, {"name": call.name, "arguments": call.arguments}
        method = getattr(self._environment, call.name)
        return method, bind_arguments(method, call.arguments)

    async def run_episode(
        self, endpoint: str, sampling: dict[str, Any], timeout_s: float
    ) -> Failure | TruncationReason | None:
        """Have the environment run its own agent loop; return None if the loop ended normally.

        Args:
            endpoint: URL at which the environment asks for turns of the model.
            sampling: temperature and `max_tokens` of a turn, length of the context, for information.
            timeout_s: deadline for the whole episode; the caller has an earlier one.
        """
        arguments = {"endpoint": endpoint, "sampling": sampling}
        outcome = await self._call(self._environment.run_episode, arguments, timeout_s)
        match outcome:
            case Ok():
                return None
            case TimedOut():
                return TruncationReason.TOOL_TIME
            case Failed():
                return self._failure(RolloutReason.ENV_STEP, "its own loop", outcome)

    async def reward(self, timeout_s: float, messages: Sequence[Message] = ()) -> list[RewardPart]:
        """Return the environment's own reward for this conversation, as measured or unmeasured parts."""
        lookup = self._find_reward(messages)
        match lookup:
            case Ok(None):
                return []
            case Ok((function, arguments)):
                limit_s = self._limit_s("get_reward", timeout_s)
                return self._parts(await self._call(function, arguments, limit_s), messages)
            case _:
                return self._parts(lookup, messages)

    async def freeze(self, max_bytes: int, timeout_s: float) -> bytes | Failure:
        """Return a snapshot of the instance's attributes."""
        return self._snapshot(await self._call(freeze, {"env": self._environment, "max_bytes": max_bytes}, timeout_s))

    async def measure_and_freeze(
        self, messages: Sequence[Message], max_bytes: int, timeout_s: float, begin_snapshot: Callable[[], None]
    ) -> tuple[list[RewardPart], bytes | Failure]:
        """Return what `reward` and `freeze` return; if `get_reward` is synchronous, one thread runs both.

        Args:
            messages: the conversation after the prompt.
            max_bytes: maximum size of the snapshot.
            timeout_s: deadline for each of the two.
            begin_snapshot: called between them, in the thread that takes the snapshot.
        """
        environment = self._environment

        def freeze_now() -> bytes:
            begin_snapshot()
            return freeze(environment, max_bytes)

        lookup = self._find_reward(messages)
        if not isinstance(lookup, Ok) or lookup.value is None:
            parts = [] if isinstance(lookup, Ok) else self._parts(lookup, messages)
            return parts, self._snapshot(await self._call(freeze_now, {}, timeout_s))
        limit_s = self._limit_s("get_reward", timeout_s)
        (measured, _), (frozen, _) = await self._call_in_order([lookup.value, (freeze_now, {})], limit_s)
        if sandbox_failure(measured) is not None:
            return [], self._failure(RolloutReason.SANDBOX, "get_reward", measured)
        return self._parts(measured, messages), self._snapshot(frozen)

    async def close(self) -> None:
        """Call the instance's `close`, if it has one, with a deadline; errors are logged."""
        environment, self._environment = self._environment, None
        self.needs_replacement = False
        outcome = call_inline(partial(getattr, environment, "close", None), {})
        if isinstance(outcome, Ok) and not callable(outcome.value):
            return
        if isinstance(outcome, Ok):
            outcome = await self._calls.call(outcome.value, {}, _CLOSE_TIMEOUT_S)
        if not isinstance(outcome, Ok):
            log.warning("environment.close_failed", environment=self.name, why=describe_failure(outcome))

    def _find_reward(self, messages: Sequence[Message]) -> Outcome:
        """Return the call that measures the reward, or a failure: to find it may run the instance's `__getattr__`."""
        return call_inline(reward_call, {"env": self._environment, "messages": messages})

    def _parts(self, outcome: Outcome, messages: Sequence[Message]) -> list[RewardPart]:
        parts = reward_parts(outcome, messages)
        self.needs_replacement |= any(isinstance(part.reward, Unmeasured) for part in parts)
        return parts

    def _snapshot(self, outcome: Outcome) -> bytes | Failure:
        if isinstance(outcome, Ok):
            return bytes(outcome.value)
        reason = RolloutReason.ENV_TIMEOUT if isinstance(outcome, TimedOut) else RolloutReason.ENV_STEP
        return self._failure(reason, "taking its snapshot", outcome)

    def _limit_s(self, call: str, timeout_s: float) -> float:
        """Return the deadline of a call: the environment's own, if it states one."""
        return stated_timeout_s(self._environment, call, timeout_s) if self.factory.states_timeouts else timeout_s

    async def _call(self, function: Callable[..., Any], arguments: Mapping[str, Any], timeout_s: float) -> Outcome:
        ((outcome, _),) = await self._call_in_order([(function, arguments)], timeout_s)
        return outcome

    async def _call_in_order(self, calls: Sequence[Call], timeout_s: float) -> list[TimedOutcome]:
        """Call methods of the instance. It may still be busy after an interrupt or a timeout: then it is replaced."""
        try:
            outcomes = await self._calls.call_in_order(calls, timeout_s)
        except BaseException:
            self.needs_replacement = True
            raise
        for outcome, _ in outcomes:
            if isinstance(outcome, TimedOut):
                self.needs_replacement = True
        if self._sandboxes is not None and self._sandboxes.failure is not None:  # also if the environment caught it
            outcomes[-1] = Failed(self._sandboxes.failure), outcomes[-1][1]
        return outcomes

    def _failure(self, reason: RolloutReason, activity: str, outcome: Outcome) -> Failure:
        self.needs_replacement = True
        if sandbox_failure(outcome) is not None:
            reason = RolloutReason.SANDBOX
        source = f"environment {self.name}, {activity}"
        detail = f"{self.name}: {activity}: {describe_failure(outcome)}"
        return Failure(reason=reason, detail=detail, cause=outcome_cause(outcome, source))

    def _validate_observation(self, value: Any) -> Observation | Failure:
        """Return the observation that `reset` returned; a failure if a prompt cannot end with it."""
        if isinstance(value, str):
            return replace_surrogates(value)
        if is_plain_data(value) and is_observation(value):
            observation: Observation = value
            return observation
        kind = type(value).__name__
        error = TypeError(
            f"{kind} returned; None, a string, a list of content parts, or a list of messages with roles is expected, "
            "all of plain data"
        )
        return self._failure(RolloutReason.ENV_RESET, "reset", Failed(error))


def _is_environment_failure(error: BaseException) -> bool:
    """Whether an error is an `EnvironmentFailure`, or a task group's exception group that contains one."""
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(EnvironmentFailure) is not None
    return isinstance(error, EnvironmentFailure)
