"""One conversation between the policy and its environment, which makes one completion.

::

    reset ─► prompt ids ─► sample ─► parse ─► no call ─► respond ─► None, or no such method ─► reward, snapshot
                             ▲         └► calls ─► tools ─┐  │
                             │                            ▼  ▼
                             │                          replies ─► done, or a limit is reached ─►
                             └──── continuation ids ◄─────┘   or, if the template rewrites history, the whole context

An episode ends with a value: None (the model or the environment was done), a `TruncationReason`, or a `Failure`. Only
what concerns all completions of the group is raised: no engine answers, or the chat template refuses the prompt.
"""

from dataclasses import replace
from functools import partial

import anyio

from envs.contract import Observation
from envs.messages import is_empty_prompt
from stream.errors import EngineError, EngineUnavailableError
from stream.records import Completion, Failure, Message, Row, ToolRun
from stream.validity import RolloutReason, TruncationReason
from workers.rollout.chat.renderer import AssistantTurn
from workers.rollout.engine_client.sampled_turn import SampledTurn
from workers.rollout.engine_client.sampling import end_after_error
from workers.rollout.environment_slot import EnvironmentSlot
from workers.rollout.episode_base import BaseEpisode, EpisodeContext, EpisodeEnd, timed
from workers.rollout.messages import (
    append_observation,
    assistant_message,
    call_id,
    storable_arguments,
    tool_call_entry,
    tool_message,
)
from workers.rollout.row_builder import MultiRowBuilder
from workers.rollout.tool_formats.parsed_turn import ParsedTurn, ToolCall
from workers.rollout.tool_formats.reasoning import reasoning_end
from workers.rollout.tool_result import ToolResult, truncate_result

_LONG_TURN_CHARACTERS = 20_000
"""Turns of this length and more are parsed in a thread, so that they do not block the event loop."""

_EMPTY_PROMPT = (
    "the prompt is empty: without a prompt column (data.prompt is empty) reset has to return the "
    "prompt, as text or as messages with roles"
)


async def run_episode(context: EpisodeContext) -> Completion:
    """Run one conversation; see `BaseEpisode.run`."""
    return await ConversationEpisode(context).run()


class ConversationEpisode(BaseEpisode):
    """An episode whose turns this worker drives: sample, parse, call tools or `respond`, append what they return."""

    def __init__(self, context: EpisodeContext) -> None:
        super().__init__(context)
        self._chat, self._tool_format = context.chat, context.tool_format
        self._limits = context.limits
        self._builder = MultiRowBuilder()
        self._turns: list[AssistantTurn] = []
        self._generated_ids = 0
        self._calls_refused = False

    def prompt_messages(self, observation: Observation) -> list[Message]:
        """Return the prompt with the observation appended."""
        return append_observation(self.context.prompt.messages, observation)

    async def run_turns(self) -> EpisodeEnd:
        """Sample and call tools, turn by turn, until the episode ends or its time is up."""
        if not self.context.prompt.is_plain_text and is_empty_prompt(self.completion.prompt_messages):
            return Failure(reason=RolloutReason.ENV_RESET, detail=_EMPTY_PROMPT)
        self._builder = MultiRowBuilder(await self._chat.encode_prompt(self.completion.prompt_messages))
        with anyio.move_on_after(self._limits.episode_timeout_s):
            return await self._converse()
        return TruncationReason.WALL_CLOCK

    def rows(self) -> list[Row]:
        """Return the rows that were sampled."""
        return self._builder.rows()

    async def _converse(self) -> EpisodeEnd:
        while True:
            context = self._builder.context()
            budget = min(self._limits.max_tokens_per_turn, self._limits.max_tokens - self._builder.token_count)
            sampled = await self._sample(context, budget)
            if not isinstance(sampled, SampledTurn):
                return sampled
            open_reasoning = self._chat.open_reasoning(context)
            text = await self._chat.decode_turn(sampled.token_ids)
            turn = AssistantTurn(sampled.token_ids, text, open_reasoning=open_reasoning)
            parsed = await self._parse(turn)
            self.completion.messages.append(_message(parsed))
            if sampled.is_truncated:
                return TruncationReason.LENGTH if len(sampled.token_ids) >= budget else TruncationReason.CONTEXT
            with timed(self.completion, "tools"):
                replies = await self._replies(turn, parsed)
            if replies is None or isinstance(replies, Failure):
                return replies
            self._turns.append(replace(turn, replies=replies))
            end = self._limit_reached() or await self._extend_context()
            if end is not None:
                return end

    async def _replies(self, turn: AssistantTurn, parsed: ParsedTurn) -> list[Message] | Failure | None:
        """Return what follows a turn: results of its tool calls, or the environment's response; None: nothing does."""
        slot = self.context.slot
        replies: list[Message] | Failure | None
        if parsed.calls or parsed.errors:
            replies = await self._call_tools(parsed)
        elif slot is not None and slot.responds:
            replies = await self._respond(slot, turn)
        else:
            return None
        if replies is None or isinstance(replies, Failure):
            return replies
        self.completion.messages += replies
        done = slot is not None and await slot.is_done(self._limits.call_timeout_s)
        return done if isinstance(done, Failure) else None if done else replies

    async def _respond(self, slot: EnvironmentSlot, turn: AssistantTurn) -> list[Message] | Failure | None:
        """Have the environment answer a turn; it reads the text after the reasoning."""
        end = reasoning_end(turn.text, starts_in_reasoning=bool(turn.open_reasoning))
        text = turn.text[end:].lstrip() if end else turn.text
        messages = await slot.respond(text, self.completion.messages, self._limits.call_timeout_s)
        if messages is None or isinstance(messages, Failure):
            return messages
        return [
            message | {"content": truncate_result(message["content"], self._limits.max_tokens)} for message in messages
        ]

    async def _sample(self, context: list[int], max_tokens: int) -> SampledTurn | Failure | TruncationReason:
        turn = self.completion.turns
        options = self.context.sampling_options(turn, max_tokens=max_tokens, stop_token_ids=self._chat.stop_token_ids)
        try:
            with timed(self.completion, "engine"):
                sampled = await self.context.sampler.sample(
                    context, options, min_policy_version=self.context.min_policy_version
                )
        except EngineUnavailableError:
            raise
        except EngineError as error:
            return end_after_error(error, turn)
        self._builder.append_sample(sampled)
        self.completion.turns += 1
        return sampled

    async def _parse(self, turn: AssistantTurn) -> ParsedTurn:
        """Read the tool calls of a turn; every call gets an id."""
        if self.context.slot is None or not self.context.slot.has_tools:
            return ParsedTurn(turn.text)
        parse = partial(self._tool_format.parse, turn.text, starts_in_reasoning=bool(turn.open_reasoning))
        parsed = parse() if len(turn.text) < _LONG_TURN_CHARACTERS else await anyio.to_thread.run_sync(parse)
        return replace(parsed, calls=[call if call.id else replace(call, id=self._new_id()) for call in parsed.calls])

    def _new_id(self) -> str:
        """Make an id for a call that has none."""
        self._generated_ids += 1
        return call_id(self._generated_ids)

    async def _call_tools(self, turn: ParsedTurn) -> list[Message] | Failure:
        """Run the calls that the limit allows, concurrently; return their results in the order of the calls."""
        completion = self.completion
        allowed = turn.calls[: max(0, self._limits.max_tool_calls - completion.tool_calls)]
        self._calls_refused = len(allowed) < len(turn.calls)
        completion.tool_calls += len(allowed)
        results = await self._run_calls(allowed)
        for result in results:
            if isinstance(result, Failure):
                return result
        answers = [result for result in results if isinstance(result, ToolResult)]
        completion.tool_errors += len(turn.errors) + sum(answer.is_error for answer in answers)
        completion.tool_runs += [ToolRun(answer.seconds, answer.is_error, answer.cause) for answer in answers]
        completion.tool_runs += [ToolRun(0.0, is_error=True)] * len(turn.errors)
        messages = [
            tool_message(truncate_result(answer.content, self._limits.max_tokens), call.id, call.name)
            for call, answer in zip(allowed, answers, strict=True)
        ]
        return messages + [tool_message(text, self._new_id()) for text in turn.errors]

    async def _run_calls(self, calls: list[ToolCall]) -> list[ToolResult | Failure]:
        slot, timeout_s = self.context.slot, self._limits.call_timeout_s
        if slot is None or not calls:
            return []
        if len(calls) == 1:
            return [await slot.call_tool(calls[0], timeout_s)]
        results: dict[int, ToolResult | Failure] = {}

        async def run_call(slot: EnvironmentSlot, position: int) -> None:
            results[position] = await slot.call_tool(calls[position], timeout_s)

        async with anyio.create_task_group() as tasks:
            for position in range(len(calls)):
                tasks.start_soon(run_call, slot, position)
        return [results[position] for position in range(len(calls))]

    def _limit_reached(self) -> TruncationReason | None:
        """Return the limit that denies the model another turn. A limit allows exactly its number."""
        if self._calls_refused:
            return TruncationReason.TOOL_CALLS
        if self.completion.tool_errors > self._limits.max_tool_errors:
            return TruncationReason.TOOL_ERRORS
        if self.completion.turns >= self._limits.max_turns:
            return TruncationReason.MAX_TURNS
        return None

    async def _extend_context(self) -> TruncationReason | None:
        """Append the last turn's replies to the context, if a token is left for the model's next turn."""
        chat, last = self._chat, self._turns[-1]
        if chat.rewrites_history:
            ids, new_count = await chat.encode_conversation(self.completion.prompt_messages, self._turns)
        else:
            ended_with_eos = list(last.token_ids[-1:]) == [chat.end_of_turn_id]
            ids = await chat.encode_continuation(last.replies, ended_with_eos)
            new_count = len(ids)
        if self._builder.token_count + new_count >= self._limits.max_tokens:
            return TruncationReason.LENGTH
        if chat.rewrites_history:
            self._builder.set_context(ids, new_count)
        else:
            self._builder.append_context(ids)
        return None


def _message(turn: ParsedTurn) -> Message:
    calls = (tool_call_entry(call.id, call.name, storable_arguments(call.arguments, call.raw)) for call in turn.calls)
    return assistant_message(turn.content, calls)
