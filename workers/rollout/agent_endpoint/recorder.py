"""Sample the turns that an agent requests, and record them as rows of one completion.

A program elsewhere (an environment server, an agent) holds the conversation and sends all of it with each request. Here
it becomes token ids, the worker's engine client samples the next turn, and the recorder keeps the tokens; the program
gets text. So the recorded tokens are the sampled ones, whatever the program sends back.

A request that continues a recorded conversation (the same messages, the same answer, then new messages) extends its row
by a continuation. Any other request (rewritten or compacted history, another agent's conversation, or a chat template
that cannot continue) starts a new row. Each row holds exactly what the model saw when it sampled.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import anyio
import msgspec
from msgspec.structs import replace

from stream.errors import DataError, EngineError, EngineRefusedError, EngineUnavailableError, PenstockError
from stream.queue.in_flight import Activity
from stream.records import Completion, Failure, Message, Row
from stream.validity import TruncationReason
from workers.rollout.agent_endpoint.openai_messages import Reply, parse_messages, parse_tools, to_template_message
from workers.rollout.chat.chat_tokenizer import ChatTokenizer
from workers.rollout.chat.renderer import AssistantTurn
from workers.rollout.engine_client.sampling import end_after_error
from workers.rollout.episode import EpisodeContext, measure_time
from workers.rollout.episode_clock import EpisodeClock
from workers.rollout.rows import RowBuilder
from workers.rollout.tool_formats.parsing import ParsedTurn

_MAX_EMPTY_REPLIES = 3
"""Empty replies after a limit is reached, so that the program can finish by itself; then requests are refused."""
_MAX_TOOL_SETS = 64
"""Distinct lists of tools to cache; a model and an environment mostly have one."""


@dataclass(eq=False, slots=True)
class _Branch:
    """One conversation, which makes one row."""

    row: RowBuilder
    chat: ChatTokenizer
    messages: list[Message] = field(default_factory=list)
    """As the program sent them, and the model's last answer."""
    prompt: list[Message] = field(default_factory=list)
    """Messages before the first turn."""
    turns: list[AssistantTurn] = field(default_factory=list)
    """Turns that were sampled, with what the program sent after each; of the last one, nothing yet."""
    ended_with_eos: bool = True
    """The last turn ended with the template's own end-of-turn token."""

    def turns_before(self, messages: list[Message]) -> list[AssistantTurn]:
        """Return the turns, the last one followed by what a request adds."""
        return [*self.turns[:-1], replace(self.turns[-1], replies=messages[len(self.messages) :])]


class Recorder:
    """Samples and records one episode's turns.

    Args:
        context: of the episode.
        completion: receives messages, turns and counts.
        clock: of the episode.

    Attributes:
        end: how a failed turn or a limit ended the episode; None while nothing did.
        error: set if no engine answers; it concerns all completions of the group.
    """

    def __init__(self, context: EpisodeContext, completion: Completion, clock: EpisodeClock) -> None:
        self.end: Failure | TruncationReason | None = None
        self.error: EngineUnavailableError | None = None
        self._context, self._completion, self._clock = context, completion, clock
        self._chats = chats_by_tools(context.chat)
        self._branches: list[_Branch] = []
        self._empty_replies = 0
        self._turn_lock = anyio.Lock()
        self._request_scope = anyio.CancelScope()
        self._closed = False
        self._last_reply: tuple[bytes, Reply] | None = None

    def rows(self) -> list[Row]:
        """Return what was sampled, one row per branch."""
        return [row for branch in self._branches if (row := branch.row.row()) is not None]

    def versions(self) -> set[int]:
        """Return the policy versions that sampled so far."""
        return set().union(*(branch.row.versions() for branch in self._branches))

    async def complete(self, request: Mapping[str, Any], *, is_retry: bool = False) -> Reply:
        """Sample a turn.

        Args:
            request: an OpenAI chat completion request; only `messages` and `tools` are read.
            is_retry: the program repeats a request whose answer was lost; the same answer is returned.

        Raises:
            EngineRefusedError: the request is malformed, a limit is reached, or the episode is over.
            EngineError: the turn could not be sampled.
        """
        async with self._turn_lock:  # a program may have several agents, but a branch grows at one end
            if not self._closed:
                with anyio.CancelScope() as self._request_scope:
                    return await self._complete(request, is_retry=is_retry)
            raise EngineRefusedError("the episode is over")

    def close(self) -> None:
        """End the episode: refuse new requests, and cancel the one that is being sampled."""
        self._closed = True
        self._request_scope.cancel()

    async def _complete(self, request: Mapping[str, Any], *, is_retry: bool) -> Reply:
        messages = parse_messages(request.get("messages"))
        try:
            key = msgspec.msgpack.encode([messages, request.get("tools")])
        except (ValueError, OverflowError, RecursionError) as error:
            raise EngineRefusedError(f"the request holds values that a record cannot hold: {error}") from error
        tools = parse_tools(request.get("tools"))
        if is_retry and self._last_reply is not None and self._last_reply[0] == key:
            return self._last_reply[1]
        limits = self._context.limits
        if self._completion.turns >= limits.max_turns:
            return self._limit_reply(TruncationReason.MAX_TURNS)
        chat, can_continue = await self._chats.get(tools)
        branch = await self._find_branch(messages, chat) if can_continue else None
        row = await self._render(messages, chat, branch)
        tokens_left = limits.max_tokens - sum(len(other.row) for other in self._branches if other is not branch)
        tokens_left -= len(row)
        if tokens_left <= 0:
            return self._limit_reply(TruncationReason.LENGTH)
        reply = await self._sample(
            branch or _Branch(row, chat), row, messages, max_tokens=tokens_left, parses_tools=bool(tools)
        )
        self._last_reply = key, reply
        return reply

    async def _find_branch(self, messages: list[Message], chat: ChatTokenizer) -> _Branch | None:
        """Return the branch that a request continues, in a conversation whose history the template leaves unchanged."""
        for branch in self._branches:
            known = len(branch.messages)
            if branch.chat is chat and len(messages) > known and messages[:known] == branch.messages:
                is_unchanged = await chat.continues(branch.prompt, branch.turns_before(messages))
                return branch if is_unchanged else None
        return None

    async def _render(self, messages: list[Message], chat: ChatTokenizer, branch: _Branch | None) -> RowBuilder:
        """Return the row with the tokens that the model is to see: a branch and what is new, or a new row."""
        try:
            if branch is None:
                return RowBuilder(await chat.encode_prompt(messages))
            ids = await chat.encode_continuation(messages[len(branch.messages) :], branch.ended_with_eos)
        except DataError as error:
            raise EngineRefusedError(str(error)) from error
        row = branch.row.copy()  # a request that cannot be sampled leaves no trace
        row.append_context(ids)
        return row

    async def _sample(
        self, branch: _Branch, row: RowBuilder, messages: list[Message], *, max_tokens: int, parses_tools: bool
    ) -> Reply:
        """Sample the next turn of a branch, and record it there."""
        context, completion, chat = self._context, self._completion, branch.chat
        options = context.sampling_options(
            completion.turns,
            max_tokens=min(context.limits.max_tokens_per_turn, max_tokens),
            stop_token_ids=chat.stop_token_ids,
        )
        prompt_ids = row.context()
        prompt_length, starts_in_reasoning = len(prompt_ids), bool(chat.open_reasoning(prompt_ids))
        context.progress.activity = Activity.SAMPLING
        try:
            with measure_time(completion, "engine"), self._clock.engine:
                sampled = await context.sampler.sample(
                    prompt_ids, options, min_policy_version=context.min_policy_version
                )
        except EngineUnavailableError as error:
            self.error = error
            raise
        except EngineError as error:
            self._record_end(end_after_error(error, completion.turns))
            raise
        finally:
            context.progress.activity = Activity.OWN_LOOP
        text = await chat.decode_turn(sampled.token_ids)
        row.append_sample(sampled)
        turn = ParsedTurn(text)
        if parses_tools:
            turn = context.tool_format.parse(text, starts_in_reasoning=starts_in_reasoning)
        message = to_template_message(turn, messages)
        self._record_turn(messages, message, turn)
        if branch not in self._branches:
            self._branches.append(branch)
        branch.prompt = branch.prompt or messages
        turns = branch.turns_before(messages) if branch.turns else []
        branch.turns = [*turns, AssistantTurn(sampled.token_ids, text)]
        branch.row, branch.messages = row, [*messages, message]
        branch.ended_with_eos = sampled.token_ids[-1:] == [chat.end_of_turn_id]
        finish_reason = "length" if sampled.is_truncated else "tool_calls" if turn.calls else "stop"
        return Reply(message, finish_reason, prompt_length, len(sampled.token_ids))

    def _record_turn(self, messages: list[Message], message: Message, turn: ParsedTurn) -> None:
        """Append the conversation to the completion, for people and reward functions, in the order it happened."""
        completion = self._completion
        if not completion.turns:
            completion.prompt_messages = messages
        recorded = [*completion.prompt_messages, *completion.messages]
        common = next((i for i, (a, b) in enumerate(zip(recorded, messages, strict=False)) if a != b), len(recorded))
        completion.messages += [*messages[common:], message]
        completion.turns += 1
        completion.tool_calls += len(turn.calls)
        completion.tool_errors += len(turn.errors)

    def _record_end(self, end: Failure | TruncationReason) -> None:
        """Record how the episode ends; a failure outweighs a limit."""
        if isinstance(end, Failure) or not isinstance(self.end, Failure):
            self.end = end

    def _limit_reply(self, reason: TruncationReason) -> Reply:
        """Return an empty reply once a limit is reached."""
        self._record_end(reason)
        self._empty_replies += 1
        if self._empty_replies > _MAX_EMPTY_REPLIES:
            raise EngineRefusedError(f"the episode is over: its limit, {reason}, is reached")
        return Reply({"role": "assistant", "content": ""}, "length")


class ChatsByTools:
    """One model's chat with the tools of each request, and whether its template can continue after a turn."""

    def __init__(self, chat: ChatTokenizer) -> None:
        self._chat = chat
        self._cache: dict[bytes, tuple[ChatTokenizer, bool]] = {}

    async def get(self, tools: list[dict[str, Any]] | None) -> tuple[ChatTokenizer, bool]:
        """Return the chat with these tools, and whether conversations continue in one row."""
        key = msgspec.json.encode(tools)
        if key not in self._cache:
            if len(self._cache) >= _MAX_TOOL_SETS:
                self._cache.clear()
            self._cache[key] = await anyio.to_thread.run_sync(partial(_chat_with_tools, self._chat, tools))
        return self._cache[key]


@lru_cache(maxsize=32)
def chats_by_tools(chat: ChatTokenizer) -> ChatsByTools:
    """Return the cache that all groups of an environment share, so that each list of tools is checked once."""
    return ChatsByTools(chat)


def _chat_with_tools(chat: ChatTokenizer, tools: list[dict[str, Any]] | None) -> tuple[ChatTokenizer, bool]:
    """Return the chat, and whether conversations continue; if not, each turn is rendered as a whole, in its own row."""
    chat = chat.with_tools(tools)
    try:
        history = chat.check_history(with_user_replies=True)
        if history.rewrites_history:  # perhaps after a user message only, as many templates do
            chat.check_history()
    except PenstockError:  # the template knows no tools
        return chat, False
    return chat, not chat.rewrites_history
