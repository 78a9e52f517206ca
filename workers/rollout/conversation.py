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

from functools import partial

import anyio

from envs.contract import Observation
from envs.messages import is_empty_prompt
from stream.errors import EngineError, EngineUnavailableError
from stream.queue.in_flight import Activity
from stream.records import Completion, Failure, Message, Row
from stream.validity import RolloutReason, TruncationReason
from workers.rollout.chat.renderer import AssistantTurn
from workers.rollout.engine_client.sampling import SampledTurn, end_after_error
from workers.rollout.episode import BaseEpisode, EnvironmentReplies, EpisodeContext, EpisodeEnd, measure_time
from workers.rollout.messages import (
    append_observation,
    assistant_message,
    storable_arguments,
    tool_call_entry,
)
from workers.rollout.resume import ReplayDiffersError
from workers.rollout.rows import MultiRowBuilder
from workers.rollout.token_ids import TokenIds
from workers.rollout.tool_formats.parsing import ParsedTurn, reasoning_end

_LONG_TURN_CHARACTERS = 20_000
"""Turns of this length and more are parsed in a thread, so that they do not block the event loop."""

EMPTY_PROMPT = (
    "the prompt is empty: without a prompt column (data.prompt is empty) reset has to return the "
    "prompt, as text or as messages with roles"
)


UNSAVED = (
    "the server did not save that calls with external effects are about to be made, so the worker did not make them; "
    "it is short of memory, or did not answer"
)


async def run_episode(context: EpisodeContext) -> Completion:
    """Run one conversation; see `BaseEpisode.run`."""
    return await ConversationEpisode(context).run()


class ConversationEpisode(BaseEpisode):
    """An episode whose turns this worker drives: sample, parse, call tools or `respond`, append what they return."""

    context: EpisodeContext

    def __init__(self, context: EpisodeContext) -> None:
        super().__init__(context)
        self._chat, self._tool_format = context.chat, context.tool_format
        self._limits = context.limits
        self._builder = MultiRowBuilder()
        self._turns: list[AssistantTurn] = []
        self._is_rewritten = False
        self._replies = EnvironmentReplies(context, self.completion, self.clock)

    def prompt_messages(self, observation: Observation) -> list[Message]:
        """Return the prompt with the observation appended."""
        return append_observation(self.context.prompt.messages, observation)

    async def run_turns(self) -> EpisodeEnd:
        """Sample and call tools, turn by turn, until the episode ends or its time is up."""
        if not self.context.prompt.is_plain_text and is_empty_prompt(self.completion.prompt_messages):
            return Failure(reason=RolloutReason.ENV_RESET, detail=EMPTY_PROMPT)
        self._builder = MultiRowBuilder(await self._chat.encode_prompt(self.completion.prompt_messages))
        journal = self.context.journal
        self._check_sandboxes()
        if journal is not None:
            journal.add_read(self.completion.prompt_messages)
        with self.clock:
            end = await self._converse()
            if journal is not None:
                journal.check_end()
            return end
        return self.clock.running

    def rows(self) -> list[Row]:
        """Return the rows that were sampled."""
        return self._builder.rows()

    def versions(self) -> set[int]:
        """Return the policy versions that sampled so far."""
        return self._builder.versions()

    async def _converse(self) -> EpisodeEnd:
        while True:
            context = self._builder.context()
            budget = min(self._limits.max_tokens_per_turn, self._limits.max_tokens - self._builder.token_count)
            open_reasoning = self._chat.open_reasoning(context)
            sampled = self._recorded_turn() or await self._sample(context, budget)
            if not isinstance(sampled, SampledTurn):
                return sampled
            text = await self._chat.decode_turn(sampled.token_ids)
            turn = AssistantTurn(sampled.token_ids, text, open_reasoning=open_reasoning)
            parsed = await self._parse(turn)
            self.completion.messages.append(turn_message(parsed))
            if sampled.is_truncated:
                return TruncationReason.LENGTH if len(sampled.token_ids) >= budget else TruncationReason.CONTEXT
            if not await self._save(sampled, parsed):
                return Failure(reason=RolloutReason.EFFECTS, detail=UNSAVED)
            self.begin_calls(f"turn{self.completion.turns - 1}")
            replies = await self._replies.after(parsed, _text_after_reasoning(turn))
            self._check_sandboxes()
            if replies is None or isinstance(replies, Failure):
                return replies
            if self.context.journal is not None:
                self.context.journal.add_read(replies)
            self._turns.append(AssistantTurn(turn.token_ids, text, replies, open_reasoning))
            end = self._replies.limit_reached() or await self._extend_context()
            if end is not None:
                return end

    def _recorded_turn(self) -> SampledTurn | None:
        """Return the turn if an earlier attempt sampled it."""
        if self.context.journal is None or (turn := self.context.journal.next_turn()) is None:
            return None
        self._builder.append_sample(turn)
        self.completion.turns += 1
        return turn

    async def _save(self, sampled: SampledTurn, parsed: ParsedTurn) -> bool:
        """Save a turn that something follows; return False if its calls have effects, and it is not saved."""
        journal, calls = self.context.journal, self._replies.count_calls(parsed)
        if journal is None or not (calls or parsed.errors):
            return True
        if self.completion.turns > journal.turn:
            sandboxes = self.context.sandboxes
            journal.save_turn(sampled, calls, sandboxes.agents if sandboxes is not None else ())
        return await journal.may_call()

    def is_past(self) -> bool:
        """See `BaseEpisode.is_past`."""
        return self.context.journal is not None and self.context.journal.is_past()

    def _check_sandboxes(self) -> None:
        """Begin anew if a past call asked an adopted sandbox for something that it cannot answer as before."""
        if self.context.sandboxes is not None and (difference := self.context.sandboxes.calls.difference):
            raise ReplayDiffersError(difference)

    async def _sample(self, context: TokenIds, max_tokens: int) -> SampledTurn | Failure | TruncationReason:
        turn = self.completion.turns
        if self.context.journal is not None:
            await self.context.journal.wait_saved()
        options = self.context.sampling_options(turn, max_tokens=max_tokens, stop_token_ids=self._chat.stop_token_ids)
        self.context.progress.activity = Activity.SAMPLING
        try:
            with measure_time(self.completion, "engine"):
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
        for call in parsed.calls:
            call.id = call.id or self._replies.new_call_id()
        return parsed

    async def _extend_context(self) -> TruncationReason | None:
        """Append the last turn's replies to the context, if a token is left for the model's next turn."""
        chat, last = self._chat, self._turns[-1]
        left = self._limits.max_tokens - self._builder.token_count
        prompt = self.completion.prompt_messages
        self._is_rewritten = self._is_rewritten or not await chat.continues(prompt, self._turns)
        if self._is_rewritten:
            whole, new_count = await chat.encode_conversation(prompt, self._turns)
            if new_count >= left:
                return TruncationReason.LENGTH
            self._builder.set_context(whole, new_count)
            return None
        ended_with_eos = list(last.token_ids[-1:]) == [chat.end_of_turn_id]
        ids = await chat.encode_continuation(last.replies, ended_with_eos)
        if len(ids) >= left:
            return TruncationReason.LENGTH
        self._builder.append_context(ids)
        return None


def _text_after_reasoning(turn: AssistantTurn) -> str:
    end = reasoning_end(turn.text, starts_in_reasoning=bool(turn.open_reasoning))
    return turn.text[end:].lstrip() if end else turn.text


def turn_message(turn: ParsedTurn) -> Message:
    """Return a turn as a message."""
    calls = (tool_call_entry(call.id, call.name, storable_arguments(call.arguments, call.raw)) for call in turn.calls)
    return assistant_message(turn.content, calls)
