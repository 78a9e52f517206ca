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
from workers.rollout.chat.chat import Chat
from workers.rollout.chat.conversation import Turn
from workers.rollout.draft import Drafts
from workers.rollout.ends import measure, new_completion, row_of, timed
from workers.rollout.engine.answer import Sampled, cut_off
from workers.rollout.engine.sampling import Sampler, Sampling, ending_of, turn_seed
from workers.rollout.long_result import cut
from workers.rollout.messages import assistant_message, call_id, observed, storable, tool_call, tool_message
from workers.rollout.slot import Slot
from workers.rollout.tool_formats.turn import ParsedTurn, ToolCall, ToolFormat
from workers.rollout.tool_result import ToolResult
from workers.settings import Rollout

Ending = TruncationReason | Failure | None

_LONG = 20_000
"""Characters of a turn that is parsed off the event loop."""


async def play(
    prompt: Prompt,
    index: int,
    *,
    chat: Chat,
    sampler: Sampler,
    slot: Slot | None,
    limits: Rollout,
    tool_format: ToolFormat,
    at_least: int = 0,
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
        at_least: oldest policy version that may sample.

    Raises:
        EngineUnavailableError: no engine answers.
        DataError: the chat template refuses the prompt.
    """
    started = time.perf_counter()
    episode = _Episode(prompt, index, chat, sampler, slot, limits, tool_format, at_least)
    ending: Ending = await episode.begin()
    if ending is None:
        with anyio.move_on_after(limits.wall_clock_s) as clock:
            ending = await episode.take_turns()
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
        chat: Chat,
        sampler: Sampler,
        slot: Slot | None,
        limits: Rollout,
        tool_format: ToolFormat,
        at_least: int,
    ) -> None:
        self.prompt, self.chat, self.sampler, self.slot = prompt, chat, sampler, slot
        self.limits, self.tool_format, self.at_least = limits, tool_format, at_least
        self.completion = new_completion(prompt, index)
        self.drafts = Drafts()
        self.turns: list[Turn] = []
        self.calls_named = 0
        self.calls_refused = False

    async def begin(self) -> Failure | None:
        """Reset the environment and render the prompt."""
        if self.slot is not None:
            index = self.completion.index
            with timed(self.completion, "reset"):
                observation = await self.slot.reset(
                    row_of(self.prompt), self.prompt.seed + index, index, self.limits.reset_timeout_s
                )
            if isinstance(observation, Failure):
                return observation
            self.completion.prompt_messages = observed(self.prompt.messages, observation)
        self.drafts = Drafts(await self.chat.encode_prompt(self.completion.prompt_messages))
        return None

    async def take_turns(self) -> Ending:
        """Sample and call tools, turn by turn, until the episode ends."""
        while True:
            context = self.drafts.context()
            begun = self.chat.begun_thought(context)
            sampled = await self._sample(context)
            if not isinstance(sampled, Sampled):
                return sampled
            said = Turn(sampled.token_ids, self.chat.decode(sampled.token_ids), begun=begun)
            turn = await self._read(said)
            self.completion.messages.append(_message(turn))
            if cut_off(sampled.finish_reason):
                whole = len(sampled.token_ids) >= self._budget(before=len(sampled.token_ids))
                return TruncationReason.LENGTH if whole else TruncationReason.CONTEXT
            if not turn.calls and not turn.errors:
                return None
            with timed(self.completion, "tools"):
                results = await self._use_tools(turn)
            if isinstance(results, Failure):
                return results
            self.completion.messages += results
            self.turns.append(replace(said, results=results))
            ending = self._limit_reached() or await self._go_on()
            if ending is not None:
                return ending

    async def finish(self, ending: Ending) -> Completion:
        """The completion, with reward and snapshot."""
        completion = self.completion
        if isinstance(ending, Failure):
            completion.failure = ending
        else:
            completion.truncated = ending
        completion.rows = self.drafts.rows()
        if self.slot is not None:
            await measure(completion, self.slot, self.limits)
        return completion

    async def _sample(self, context: list[int]) -> Sampled | Ending:
        sampling = Sampling.of(
            self.limits,
            max_tokens=self._budget(),
            stop_token_ids=self.chat.stop_token_ids,
            seed=turn_seed(self.prompt.seed + self.completion.index, self.completion.turns),
            group=self.prompt.id,
            completion=self.completion.index,
        )
        try:
            with timed(self.completion, "engine"):
                sampled = await self.sampler.sample(context, sampling, at_least=self.at_least)
            self.drafts.sample(sampled)
        except EngineUnavailableError:
            raise
        except EngineError as error:
            return ending_of(error, self.completion.turns)
        self.completion.turns += 1
        return sampled

    def _budget(self, before: int = 0) -> int:
        """Tokens that a turn may have, as it stands now or stood `before` so many tokens."""
        left = self.limits.max_tokens - self.drafts.used + before
        return min(self.limits.max_tokens_per_turn, left)

    async def _read(self, said: Turn) -> ParsedTurn:
        if self.slot is None or not self.slot.has_tools:
            return ParsedTurn(said.text)
        parse = partial(self.tool_format.parse, said.text, thinking=bool(said.begun))
        parsed = parse() if len(said.text) < _LONG else await anyio.to_thread.run_sync(parse)
        return replace(parsed, calls=[call if call.id else replace(call, id=self._new_id()) for call in parsed.calls])

    def _new_id(self) -> str:
        """A name for a call that the model gave none."""
        self.calls_named += 1
        return call_id(self.calls_named)

    async def _use_tools(self, turn: ParsedTurn) -> list[Message] | Failure:
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
            tool_message(cut(result.content, self.limits.max_tokens), call.id, call.name)
            for call, result in zip(allowed, answered, strict=True)
        ]
        return messages + [tool_message(text, self._new_id()) for text in turn.errors]

    async def _call_all(self, calls: list[ToolCall]) -> list[ToolResult | Failure]:
        slot, timeout_s = self.slot, self.limits.tool_timeout_s
        if slot is None or not calls:
            return []
        if len(calls) == 1:
            return [await slot.call_tool(calls[0], timeout_s)]
        results: dict[int, ToolResult | Failure] = {}

        async def one(slot: Slot, position: int) -> None:
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

    async def _go_on(self) -> TruncationReason | None:
        """Show the model what its tools answered, if a token is left for what it may say to that."""
        last = self.turns[-1]
        if self.chat.forks:
            ids, new = await self.chat.encode_conversation(self.completion.prompt_messages, self.turns)
        else:
            ended = list(last.token_ids[-1:]) == [self.chat.end_of_turn_id]
            ids = await self.chat.encode_continuation(last.results, ended)
            new = len(ids)
        if self.drafts.used + new >= self.limits.max_tokens:
            return TruncationReason.LENGTH
        if self.chat.forks:
            self.drafts.show(ids, new)
        else:
            self.drafts.see(ids)
        return None


def _message(turn: ParsedTurn) -> Message:
    calls = (tool_call(call.id, call.name, storable(call.arguments, call.raw)) for call in turn.calls)
    return assistant_message(turn.content, calls)
