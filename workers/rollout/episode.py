"""The steps of every episode: reset the environment, run the turns, measure the reward, freeze the environment.

What an environment says after a turn: tool results, or its `respond`; and the limits that end an episode.
"""

import copy
import time
from abc import ABC, abstractmethod
from functools import partial
from typing import Any, Final

from msgspec import Struct, field

from envs.contract import Observation
from stream.queue.in_flight import Activity
from stream.records import MAX_ACTIVITY_TIMES, ActivityTime, Completion, Failure, Message, Prompt, Row, ToolRun
from stream.validity import TruncationReason
from workers.role.in_flight_reporter import CompletionProgress
from workers.rollout.chat.chat_tokenizer import ChatTokenizer
from workers.rollout.engine_client.sampling import Sampler, SamplingOptions, turn_seed
from workers.rollout.environment_slot import EnvironmentSlot
from workers.rollout.episode_clock import EpisodeClock
from workers.rollout.messages import call_id, tool_message
from workers.rollout.recorded_calls import CallScope, call_scope
from workers.rollout.resume import EpisodeJournal
from workers.rollout.sandboxes import LeasedSandboxes
from workers.rollout.tool_formats.parsing import ParsedTurn, ToolFormat
from workers.rollout.tool_result import ToolResult, truncate_result
from workers.settings import AgentSettings, RolloutSettings

EpisodeEnd = TruncationReason | Failure | None
"""How an episode ends; None: the model or the environment finished it."""

_ATOMS: Final = frozenset((str, int, float, bool, type(None)))


class EnvironmentContext(Struct, frozen=True, kw_only=True):
    """Everything that one episode needs besides a model."""

    prompt: Prompt
    index: int
    """Position within the group, from 0; part of the episode's seed. The group size itself: the greedy episode."""
    slot: EnvironmentSlot | None
    """The environment, for this episode alone; None for prompts without one."""
    limits: RolloutSettings
    """Limits of tokens, turns, tool calls and time, and the sampling distribution."""
    sandboxes: LeasedSandboxes | None = None
    """For an environment that opens some."""
    progress: CompletionProgress = field(default_factory=CompletionProgress)
    """Where the episode notes what it is doing."""

    @property
    def seed(self) -> int:
        """Seed of what the model samples in this episode; the environment gets it as `completion_seed`."""
        return self.prompt.seed + self.index


class EpisodeContext(EnvironmentContext, frozen=True, kw_only=True):
    """Everything that one episode needs whose turns this worker samples."""

    chat: ChatTokenizer
    """The model's tokenizer and chat template, with the tools of the prompt's environment."""
    tool_format: ToolFormat
    """How the model writes tool calls."""
    sampler: Sampler
    min_policy_version: int = 0
    """Oldest policy version that may sample."""
    agents: AgentSettings = field(default_factory=AgentSettings)
    """For an environment that runs its own loop."""
    journal: EpisodeJournal | None = None
    """Where its turns are saved, and come from if an earlier attempt sampled them; None: nowhere."""

    def sampling_options(self, turn: int, *, max_tokens: int, stop_token_ids: tuple[int, ...]) -> SamplingOptions:
        """Make the options for sampling one turn, counted from 0."""
        return SamplingOptions.from_settings(
            self.limits,
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            seed=turn_seed(self.seed, turn),
            group=self.prompt.id,
            completion=self.index,
            progress=self.progress,
        )


def new_completion(context: EnvironmentContext) -> Completion:
    """Return the completion of an episode that begins."""
    return Completion(
        index=context.index,
        prompt_messages=context.prompt.messages,
        seconds=dict.fromkeys(("reset", "engine", "tools", "reward", "total"), 0.0),
        greedy=context.index == context.prompt.group_size,
    )


class BaseEpisode(ABC):
    """One episode, which makes one completion."""

    context: EnvironmentContext

    def __init__(self, context: EnvironmentContext) -> None:
        self.context = context
        self.completion = new_completion(context)
        context.progress.episode = self
        self.clock = EpisodeClock(context.limits.episode_timeout_s)

    async def run(self) -> Completion:
        """Run the episode. Everything that ends it alone is recorded in its completion.

        Raises:
            EngineUnavailableError: no engine answers.
            SandboxFailure: a sandbox could not be started; nothing was sampled.
            DataError: the chat template refuses the prompt.
        """
        with measure_time(self.completion, "total"):
            end: EpisodeEnd = await self.reset()
            if end is None:
                end = await self.run_turns()
            if isinstance(end, Failure):
                self.completion.failure = end
            else:
                self.completion.truncated = end
            self.completion.rows = self.rows()
            await self.measure_and_freeze()
        return self.completion

    async def reset(self) -> Failure | None:
        """Reset the environment, if there is one."""
        context = self.context
        if context.slot is None:
            return None
        context.progress.activity = Activity.RESET
        self.begin_calls("reset")
        with measure_time(self.completion, "reset"):
            reset = (
                context.slot.reset if context.sandboxes is None else partial(context.slot.reset_with, context.sandboxes)
            )
            observation = await reset(
                _reset_fields(context.prompt), context.prompt.seed, context.index, context.limits.call_timeout_s
            )
        if isinstance(observation, Failure):
            return observation
        if (own_s := context.slot.episode_timeout_s) is not None:
            self.clock.shorten(own_s)
        self.completion.prompt_messages = self.prompt_messages(observation)
        return None

    @property
    def turn(self) -> int:
        """The model's turn, from 0."""
        return self.completion.turns

    def is_past(self) -> bool:
        """Return whether an earlier attempt at this episode has done what happens now, in the same sandboxes."""
        return False

    def begin_calls(self, name: str) -> None:
        """Name the part of the episode in which the environment is called from now on."""
        if self.context.sandboxes is not None:
            call_scope.set(CallScope(name, self.is_past()))

    def versions(self) -> set[int]:
        """Return the policy versions that sampled so far."""
        return set()

    @abstractmethod
    def prompt_messages(self, observation: Observation) -> list[Message]:
        """Return the messages that the episode starts with, given what the environment returned from `reset`."""

    @abstractmethod
    async def run_turns(self) -> EpisodeEnd:
        """Sample and act until the episode ends."""

    @abstractmethod
    def rows(self) -> list[Row]:
        """Return the rows that were sampled."""

    async def measure_and_freeze(self) -> None:
        """Take the environment's own reward, and a snapshot before the next episode resets it; not if it failed."""
        slot, completion, progress = self.context.slot, self.completion, self.context.progress
        if slot is None or completion.failure is not None:
            return
        self.begin_calls("reward")
        reward_time = measure_time(completion, "reward") if slot.has_reward else None
        progress.activity = Activity.REWARD if slot.has_reward else Activity.SNAPSHOT

        def begin_snapshot() -> None:
            if reward_time is not None:
                reward_time.stop()
            progress.activity = Activity.SNAPSHOT

        limits = self.context.limits
        parts, snapshot = await slot.measure_and_freeze(
            completion.messages, limits.max_snapshot_bytes, limits.call_timeout_s, begin_snapshot
        )
        completion.parts = parts
        if isinstance(snapshot, Failure):
            completion.failure = snapshot
        else:
            completion.snapshot = snapshot


class measure_time:  # noqa: N801  (used like a function)
    """Add the time spent in the body, or until `stop`, to `completion.seconds[activity]`, and note when it was."""

    __slots__ = ("_activity", "_began_at", "_completion", "_started")

    def __init__(self, completion: Completion, activity: str) -> None:
        self._completion, self._activity = completion, activity
        self._began_at, self._started = time.time(), time.perf_counter()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self._started
        self._completion.seconds[self._activity] += seconds
        if len(self._completion.activity_times) < MAX_ACTIVITY_TIMES:
            self._completion.activity_times.append(ActivityTime(self._activity, self._began_at, seconds))

    def stop(self) -> None:
        """Note the time since this was made."""
        self.__exit__()


def _reset_fields(prompt: Prompt) -> dict[str, Any]:
    """Return the arguments that `reset` may ask for: the data row's fields and the prompt.

    They are copies, since an environment may change them.
    """
    shown: Any = prompt.messages[-1].get("content") if prompt.is_plain_text else prompt.messages
    fields = {"prompt": shown, **prompt.fields}
    return {name: _copied(value) for name, value in fields.items()}


def _copied(value: Any) -> Any:
    """Return a deep copy. A row mostly has JSON's types, which `copy.deepcopy` takes several times as long for."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is list:
        return [_copied(each) for each in value]
    if kind is dict:
        return {_copied(key): _copied(each) for key, each in value.items()}
    return copy.deepcopy(value)


class EnvironmentReplies:
    """Runs the calls of one episode's turns, or has the environment answer them, and counts both in its completion.

    Args:
        context: of the episode.
        completion: receives messages and counts.
        clock: of the episode.
    """

    def __init__(self, context: EnvironmentContext, completion: Completion, clock: EpisodeClock) -> None:
        self._slot, self._limits, self._progress = context.slot, context.limits, context.progress
        self._completion, self._clock = completion, clock
        self._generated_ids = 0
        self._calls_refused = False

    def new_call_id(self) -> str:
        """Make an id for a call that has none."""
        self._generated_ids += 1
        return call_id(self._generated_ids)

    def count_calls(self, parsed: ParsedTurn) -> int:
        """Return how often the environment is called after a turn."""
        if self._slot is None:
            return 0
        if parsed.calls or parsed.errors:
            return len(parsed.calls)
        return int(self._slot.responds)

    async def after(self, parsed: ParsedTurn, text: str) -> list[Message] | Failure | None:
        """Return what follows a turn, which is then part of the completion's messages; None: the episode is over.

        Args:
            parsed: the turn.
            text: what `respond` reads of it: its text without the reasoning.
        """
        with measure_time(self._completion, "tools"), self._clock.tools:
            replies = await self._replies(parsed, text)
            if replies is None or isinstance(replies, Failure):
                return replies
            self._completion.messages += replies
            done = self._slot is not None and await self._slot.is_done(self._limits.call_timeout_s)
            return done if isinstance(done, Failure) else None if done else replies

    def limit_reached(self) -> TruncationReason | None:
        """Return the limit that denies the model another turn. A limit allows exactly its number."""
        if self._calls_refused:
            return TruncationReason.TOOL_CALLS
        if self._completion.tool_errors > self._limits.max_tool_errors:
            return TruncationReason.TOOL_ERRORS
        if self._completion.turns >= self._limits.max_turns:
            return TruncationReason.MAX_TURNS
        return None

    async def _replies(self, parsed: ParsedTurn, text: str) -> list[Message] | Failure | None:
        if parsed.calls or parsed.errors:
            return await self._call_tools(parsed)
        if self._slot is None or not self._slot.responds:
            return None
        self._progress.activity = Activity.RESPOND
        messages = await self._slot.respond(text, self._completion.messages, self._limits.call_timeout_s)
        if messages is None or isinstance(messages, Failure):
            return messages
        return [
            message | {"content": truncate_result(message["content"], self._limits.max_tokens)} for message in messages
        ]

    async def _call_tools(self, turn: ParsedTurn) -> list[Message] | Failure:
        """Run the calls that the limit allows, concurrently; return their results in the order of the calls."""
        completion = self._completion
        allowed = turn.calls[: max(0, self._limits.max_tool_calls - completion.tool_calls)]
        self._calls_refused = len(allowed) < len(turn.calls)
        completion.tool_calls += len(allowed)
        results: list[ToolResult | Failure] = []
        if self._slot is not None and allowed:
            self._progress.calls, self._progress.activity = allowed, Activity.TOOL
            results = await self._slot.call_tools(allowed, self._limits.call_timeout_s)
        messages, runs = [], []
        for call, result in zip(allowed, results, strict=True):
            if isinstance(result, Failure):
                return result
            content = truncate_result(result.content, self._limits.max_tokens)
            messages.append(tool_message(content, call.id, call.name))
            runs.append(ToolRun(result.seconds, result.is_error, result.cause))
        for text in turn.errors:
            messages.append(tool_message(text, self.new_call_id()))
            runs.append(ToolRun(0.0, is_error=True))
        completion.tool_errors += sum(run.is_error for run in runs)
        completion.tool_runs += runs
        return messages
