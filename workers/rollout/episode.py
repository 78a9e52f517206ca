"""One completion: the conversation between the policy and its environment, until one of them, or a limit, ends it.

::

    reset ─► prompt ids ─► sample ─► parse ─► no call ─────────────────────────► reward, snapshot
                             ▲         └► calls ─► tools ─► limit reached ─────►
                             └──── continuation ids ◄─┘   or, where the template rewrites history, all of it anew

What ends an episode is a value: None (the model was done), a `TruncationReason`, or a `Failure`. Only an engine that
answers nobody, or a prompt that the chat template refuses, is raised: that concerns all completions, not this one.
"""

import time
from dataclasses import replace
from functools import partial

import anyio

from stream.errors import EngineError, EngineUnavailableError
from stream.records import Completion, Failure, Message, Prompt
from stream.validity import TruncationReason
from workers.rollout.chat.chat_tokenizer import ChatTokenizer
from workers.rollout.chat.renderer import AssistantTurn
from workers.rollout.engine_client.sampled_turn import SampledTurn, is_truncated
from workers.rollout.engine_client.sampling import Sampler, SamplingOptions, end_after_error, turn_seed
from workers.rollout.environment_slot import EnvironmentSlot
from workers.rollout.episode_common import measure, new_completion, reset_fields, timed
from workers.rollout.long_result import truncate_result
from workers.rollout.messages import (
    append_observation,
    assistant_message,
    call_id,
    storable_arguments,
    tool_call_entry,
    tool_message,
)
from workers.rollout.row_builder import MultiRowBuilder
from workers.rollout.tool_formats.parsed_turn import ParsedTurn, ToolCall, ToolFormat
from workers.rollout.tool_result import ToolResult
from workers.settings import Rollout

EpisodeEnd = TruncationReason | Failure | None

_LONG_TURN_CHARACTERS = 20_000
"""Characters of a turn that is parsed off the event loop."""


async def run_episode(
    prompt: Prompt,
    index: int,
    *,
    chat: ChatTokenizer,
    sampler: Sampler,
    slot: EnvironmentSlot | None,
    limits: Rollout,
    tool_format: ToolFormat,
    min_policy_version: int = 0,
) -> Completion:
    """Play one episode.

    Args:
        prompt: what to complete.
        index: position within the group; part of the episode's seed.
        chat: the model's tokenizer and template, with the tools of the prompt's environment.
        sampler: samples tokens.
        slot: the environment, this episode's alone; None where there is none.
        limits: of tokens, turns, tools, time.
        tool_format: how the model writes tool calls.
        min_policy_version: oldest policy version that may sample.

    Raises:
        EngineUnavailableError: no engine answers.
        DataError: the chat template refuses the prompt.
    """
    started = time.perf_counter()
    episode = _Episode(prompt, index, chat, sampler, slot, limits, tool_format, min_policy_version)
    ending: EpisodeEnd = await episode.reset()
    if ending is None:
        with anyio.move_on_after(limits.episode_timeout_s) as clock:
            ending = await episode.run_turns()
        if clock.cancelled_caught:
            ending = TruncationReason.WALL_CLOCK
    completion = await episode.finish(ending)
    completion.seconds["total"] = time.perf_counter() - started
    return completion


class _Episode:
    """The state of one episode: its completion so far, and the draft of its row."""

    def __init__(
        self,
        prompt: Prompt,
        index: int,
        chat: ChatTokenizer,
        sampler: Sampler,
        slot: EnvironmentSlot | None,
        limits: Rollout,
        tool_format: ToolFormat,
        min_policy_version: int,
    ) -> None:
        self.prompt, self.chat, self.sampler, self.slot = prompt, chat, sampler, slot
        self.limits, self.tool_format, self.min_policy_version = limits, tool_format, min_policy_version
        self.completion = new_completion(prompt, index)
        self.rows = MultiRowBuilder()
        self.turns: list[AssistantTurn] = []
        self.generated_ids = 0
        self.calls_refused = False

    async def reset(self) -> Failure | None:
        """Reset the environment and render the prompt."""
        if self.slot is not None:
            index = self.completion.index
            with timed(self.completion, "reset"):
                observation = await self.slot.reset(
                    reset_fields(self.prompt), self.prompt.seed + index, index, self.limits.call_timeout_s
                )
            if isinstance(observation, Failure):
                return observation
            self.completion.prompt_messages = append_observation(self.prompt.messages, observation)
        self.rows = MultiRowBuilder(await self.chat.encode_prompt(self.completion.prompt_messages))
        return None

    async def run_turns(self) -> EpisodeEnd:
        """Sample and call tools, turn by turn, until the episode ends."""
        while True:
            context = self.rows.context()
            begun = self.chat.open_reasoning(context)
            sampled = await self._sample(context)
            if not isinstance(sampled, SampledTurn):
                return sampled
            said = AssistantTurn(sampled.token_ids, self.chat.decode(sampled.token_ids), open_reasoning=begun)
            turn = await self._parse(said)
            self.completion.messages.append(_message(turn))
            if is_truncated(sampled.finish_reason):
                whole = len(sampled.token_ids) >= self._token_budget(just_sampled=len(sampled.token_ids))
                return TruncationReason.LENGTH if whole else TruncationReason.CONTEXT
            if not turn.calls and not turn.errors:
                return None
            with timed(self.completion, "tools"):
                results = await self._call_tools(turn)
            if isinstance(results, Failure):
                return results
            self.completion.messages += results
            self.turns.append(replace(said, tool_results=results))
            ending = self._limit_reached() or await self._extend_context()
            if ending is not None:
                return ending

    async def finish(self, ending: EpisodeEnd) -> Completion:
        """The completion, with reward and snapshot."""
        completion = self.completion
        if isinstance(ending, Failure):
            completion.failure = ending
        else:
            completion.truncated = ending
        completion.rows = self.rows.rows()
        if self.slot is not None:
            await measure(completion, self.slot, self.limits)
        return completion

    async def _sample(self, context: list[int]) -> SampledTurn | EpisodeEnd:
        sampling = SamplingOptions.from_settings(
            self.limits,
            max_tokens=self._token_budget(),
            stop_token_ids=self.chat.stop_token_ids,
            seed=turn_seed(self.prompt.seed + self.completion.index, self.completion.turns),
            group=self.prompt.id,
            completion=self.completion.index,
        )
        try:
            with timed(self.completion, "engine"):
                sampled = await self.sampler.sample(context, sampling, min_policy_version=self.min_policy_version)
            self.rows.append_sample(sampled)
        except EngineUnavailableError:
            raise
        except EngineError as error:
            return end_after_error(error, self.completion.turns)
        self.completion.turns += 1
        return sampled

    def _token_budget(self, just_sampled: int = 0) -> int:
        """Tokens that a turn may have, as it stands now or stood `before` so many tokens."""
        left = self.limits.max_tokens - self.rows.token_count + just_sampled
        return min(self.limits.max_tokens_per_turn, left)

    async def _parse(self, turn: AssistantTurn) -> ParsedTurn:
        if self.slot is None or not self.slot.has_tools:
            return ParsedTurn(turn.text)
        parse = partial(self.tool_format.parse, turn.text, starts_in_reasoning=bool(turn.open_reasoning))
        parsed = parse() if len(turn.text) < _LONG_TURN_CHARACTERS else await anyio.to_thread.run_sync(parse)
        return replace(parsed, calls=[call if call.id else replace(call, id=self._new_id()) for call in parsed.calls])

    def _new_id(self) -> str:
        """A name for a call that the model gave none."""
        self.generated_ids += 1
        return call_id(self.generated_ids)

    async def _call_tools(self, turn: ParsedTurn) -> list[Message] | Failure:
        """Run the calls that are still allowed, at the same time; their results in the order of the calls."""
        allowed = turn.calls[: max(0, self.limits.max_tool_calls - self.completion.tool_calls)]
        self.calls_refused = len(allowed) < len(turn.calls)
        self.completion.tool_calls += len(allowed)
        results = await self._call_all(allowed)
        for result in results:
            if isinstance(result, Failure):
                return result
        answered = [result for result in results if isinstance(result, ToolResult)]
        self.completion.tool_errors += len(turn.errors) + sum(result.is_error for result in answered)
        messages = [
            tool_message(truncate_result(result.content, self.limits.max_tokens), call.id, call.name)
            for call, result in zip(allowed, answered, strict=True)
        ]
        return messages + [tool_message(text, self._new_id()) for text in turn.errors]

    async def _call_all(self, calls: list[ToolCall]) -> list[ToolResult | Failure]:
        slot, timeout_s = self.slot, self.limits.call_timeout_s
        if slot is None or not calls:
            return []
        if len(calls) == 1:
            return [await slot.call_tool(calls[0], timeout_s)]
        results: dict[int, ToolResult | Failure] = {}

        async def one(slot: EnvironmentSlot, position: int) -> None:
            results[position] = await slot.call_tool(calls[position], timeout_s)

        async with anyio.create_task_group() as tasks:
            for position in range(len(calls)):
                tasks.start_soon(one, slot, position)
        return [results[position] for position in range(len(calls))]

    def _limit_reached(self) -> TruncationReason | None:
        """The limit that keeps the model from another turn. Each allows as many as it says; one more ends it."""
        if self.calls_refused:
            return TruncationReason.TOOL_CALLS
        if self.completion.tool_errors > self.limits.max_tool_errors:
            return TruncationReason.TOOL_ERRORS
        if self.completion.turns >= self.limits.max_turns:
            return TruncationReason.MAX_TURNS
        return None

    async def _extend_context(self) -> TruncationReason | None:
        """Show the model what its tools answered, if a token is left for what it may say to that."""
        last = self.turns[-1]
        if self.chat.rewrites_history:
            ids, new = await self.chat.encode_conversation(self.completion.prompt_messages, self.turns)
        else:
            ended = list(last.token_ids[-1:]) == [self.chat.end_of_turn_id]
            ids = await self.chat.encode_continuation(last.tool_results, ended)
            new = len(ids)
        if self.rows.token_count + new >= self.limits.max_tokens:
            return TruncationReason.LENGTH
        if self.chat.rewrites_history:
            self.rows.set_context(ids, new)
        else:
            self.rows.append_context(ids)
        return None


def _message(turn: ParsedTurn) -> Message:
    calls = (tool_call_entry(call.id, call.name, storable_arguments(call.arguments, call.raw)) for call in turn.calls)
    return assistant_message(turn.content, calls)
