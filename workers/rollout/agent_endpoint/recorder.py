"""What an episode that leads itself asks of the policy, and what the policy said: recorded where it is sampled.

A program elsewhere (an environment server, an agent) holds the conversation and sends it whole with each request. It is
turned into token ids here, sampled by the worker's own engine client, and kept; the program is told text. So what is
trained on is what was sampled, whatever comes back over the wire.

Where a request goes on from the last turn (the same messages, the very answer, then new ones), its row goes on too, by
a continuation. Where it does not (history rewritten, compacted, another agent's), or where the chat template cannot go
on, a new row begins: each is exact for what the model saw when it sampled.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import anyio
import msgspec

from stream.errors import DataError, EngineError, EngineRefusedError, EngineUnavailableError, PenstockError
from stream.records import Completion, Failure, Message, Row
from stream.validity import TruncationReason
from workers.rollout.agent_endpoint.openai_messages import Reply, parse_messages, to_template_message
from workers.rollout.chat.chat_tokenizer import ChatTokenizer
from workers.rollout.chat.history_check import check_history
from workers.rollout.engine_client.sampled_turn import is_truncated
from workers.rollout.engine_client.sampling import Sampler, SamplingOptions, end_after_error, turn_seed
from workers.rollout.episode_common import timed
from workers.rollout.row_builder import RowBuilder
from workers.rollout.tool_formats.parsed_turn import ParsedTurn, ToolFormat
from workers.settings import Rollout

_MAX_EMPTY_REPLIES = 3
"""Empty turns that a program gets once a limit is reached, so that it may end by itself; then it is refused."""
_MAX_TOOL_SETS = 64
"""Different lists of tools that are remembered; a model and an environment mostly have one."""


@dataclass(slots=True)
class _Branch:
    """One line of conversation, which is one row."""

    row: RowBuilder
    chat: ChatTokenizer
    messages: list[Message] = field(default_factory=list)
    """As the program sent them, the model's last answer included."""
    ended_with_eos: bool = True
    """The last turn ended with the template's own token."""


class Recorder:
    """One episode's turns.

    Args:
        completion: gains messages, turns and rows.
        chats: of the model, by the tools that a request brings.
        sampler: samples tokens.
        limits: of tokens and turns.
        tool_format: how the model writes tool calls.
        min_policy_version: the oldest policy version that may sample.
        seed: of the episode.
        group: that it belongs to.

    Attributes:
        failure: why nobody knows what the policy would have done.
        error: about all completions alike.
    """

    def __init__(
        self,
        completion: Completion,
        chats: "ChatsByTools",
        sampler: Sampler,
        limits: Rollout,
        tool_format: ToolFormat,
        min_policy_version: int,
        seed: int = 0,
        group: str = "",
    ) -> None:
        self.completion = completion
        self.failure: Failure | None = None
        self.error: EngineUnavailableError | None = None
        self._chats, self._sampler, self._limits = chats, sampler, limits
        self._tool_format, self._min_policy_version, self._seed, self._group = (
            tool_format,
            min_policy_version,
            seed,
            group,
        )
        self._branches: list[_Branch] = []
        self._empty_replies = 0
        self._turn_lock = anyio.Lock()
        self._request_scope = anyio.CancelScope()
        self._closed = False
        self._last_reply: tuple[bytes, Reply] | None = None

    def rows(self) -> list[Row]:
        """What was sampled, a row to each line of conversation."""
        return [row for thread in self._branches if (row := thread.row.row()) is not None]

    async def complete(self, request: Mapping[str, Any], *, is_retry: bool = False) -> Reply:
        """Sample a turn.

        Args:
            request: of OpenAI's chat completions; `messages` and `tools` are read.
            is_retry: the program repeats a request whose answer did not reach it; the same answer is given once more.

        Raises:
            EngineRefusedError: a fact about the request, or a limit, or the episode is over.
            EngineError: it could not be sampled.
        """
        async with self._turn_lock:  # a program may have several agents; a line of conversation has one end
            if not self._closed:
                with anyio.CancelScope() as self._request_scope:
                    return await self._complete(request, is_retry=is_retry)
            raise EngineRefusedError("the episode is over")

    def close(self) -> None:
        """The episode is over: no turn is added any more, and one that is being sampled is given up."""
        self._closed = True
        self._request_scope.cancel()

    async def _complete(self, request: Mapping[str, Any], *, is_retry: bool) -> Reply:
        messages = parse_messages(request.get("messages"))
        try:
            key = msgspec.msgpack.encode([messages, request.get("tools") or []])
        except (ValueError, OverflowError, RecursionError) as error:
            raise EngineRefusedError(f"the request holds what no record can: {error}") from error
        if is_retry and self._last_reply is not None and self._last_reply[0] == key:
            return self._last_reply[1]
        if self.completion.turns >= self._limits.max_turns:
            return self._limit_reply(TruncationReason.MAX_TURNS)
        chat, continues = await self._chats.get(request.get("tools") or None)
        thread = self._find_thread(messages, chat) if continues else None
        draft = await self._render(messages, chat, thread)
        left = self._limits.max_tokens - sum(len(each.row) for each in self._branches if each is not thread)
        left -= len(draft)
        if left <= 0:
            return self._limit_reply(TruncationReason.LENGTH)
        reply = await self._sample(draft, chat, left, thread, messages, tools=bool(request.get("tools")))
        self._last_reply = key, reply
        return reply

    def _find_thread(self, messages: list[Message], chat: ChatTokenizer) -> _Branch | None:
        """The line of conversation that this request continues."""
        for thread in self._branches:
            known = len(thread.messages)
            new = messages[known:]
            if thread.chat is chat and new and messages[:known] == thread.messages:
                return thread
        return None

    async def _render(self, messages: list[Message], chat: ChatTokenizer, thread: _Branch | None) -> RowBuilder:
        """The tokens that the model is to see: the line's own, and what is new; or all of them, anew."""
        try:
            if thread is None:
                return RowBuilder(await chat.encode_prompt(messages))
            ids = await chat.encode_continuation(messages[len(thread.messages) :], thread.ended_with_eos)
        except DataError as error:
            raise EngineRefusedError(str(error)) from error
        longer = copy.deepcopy(thread.row)  # what could not be sampled leaves no trace
        longer.append_context(ids)
        return longer

    async def _sample(
        self,
        draft: RowBuilder,
        chat: ChatTokenizer,
        left: int,
        thread: _Branch | None,
        messages: list[Message],
        *,
        tools: bool,
    ) -> Reply:
        sampling = SamplingOptions.from_settings(
            self._limits,
            max_tokens=min(self._limits.max_tokens_per_turn, left),
            stop_token_ids=chat.stop_token_ids,
            seed=turn_seed(self._seed, self.completion.turns),
            group=self._group,
            completion=self.completion.index,
        )
        context = draft.context()
        try:
            with timed(self.completion, "engine"):
                sampled = await self._sampler.sample(context, sampling, min_policy_version=self._min_policy_version)
            draft.append_sample(sampled)
        except EngineUnavailableError as error:
            self.error = error
            raise
        except EngineError as error:
            self._end(end_after_error(error, self.completion.turns))
            raise
        text = chat.decode(sampled.token_ids)
        thinking = bool(chat.open_reasoning(context))
        turn = self._tool_format.parse(text, starts_in_reasoning=thinking) if tools else ParsedTurn(text)
        message = to_template_message(turn, messages)
        if thread is None:
            thread = _Branch(draft, chat)
            self._branches.append(thread)
        self._record(messages, message, turn)
        thread.row, thread.messages = draft, [*messages, message]
        thread.ended_with_eos = sampled.token_ids[-1:] == [chat.end_of_turn_id]
        cut = is_truncated(sampled.finish_reason)
        reason = "length" if cut else "tool_calls" if turn.calls else "stop"
        return Reply(message, reason, len(context), len(sampled.token_ids))

    def _record(self, messages: list[Message], message: Message, turn: ParsedTurn) -> None:
        """Keep the conversation for people and reward functions, in the order in which it was had."""
        completion = self.completion
        if not completion.turns:
            completion.prompt_messages = messages
        recorded = [*completion.prompt_messages, *completion.messages]
        common = next((i for i, (a, b) in enumerate(zip(recorded, messages, strict=False)) if a != b), len(recorded))
        completion.messages += [*messages[common:], message]
        completion.turns += 1
        completion.tool_calls += len(turn.calls)
        completion.tool_errors += len(turn.errors)

    def _end(self, end: Failure | TruncationReason) -> None:
        if isinstance(end, Failure):
            self.failure = end
        else:
            self.completion.truncated = end

    def _limit_reply(self, reason: TruncationReason) -> Reply:
        self._end(reason)
        self._empty_replies += 1
        if self._empty_replies > _MAX_EMPTY_REPLIES:
            raise EngineRefusedError(f"the episode is over: its limit, {reason}, is reached")
        return Reply({"role": "assistant", "content": ""}, "length")


class ChatsByTools:
    """One model's chat with whatever tools requests bring, and whether its template can go on after a turn."""

    def __init__(self, chat: ChatTokenizer) -> None:
        self._chat = chat
        self._cache: dict[bytes, tuple[ChatTokenizer, bool]] = {}

    async def get(self, tools: list[dict[str, Any]] | None) -> tuple[ChatTokenizer, bool]:
        """The chat with these tools."""
        key = msgspec.json.encode(tools)
        if key not in self._cache:
            if len(self._cache) >= _MAX_TOOL_SETS:
                self._cache.clear()
            self._cache[key] = await anyio.to_thread.run_sync(partial(_chat_with_tools, self._chat, tools))
        return self._cache[key]


@lru_cache(maxsize=32)
def chats_by_tools(chat: ChatTokenizer) -> ChatsByTools:
    """The same for every group of an environment, so that its tools are looked at once."""
    return ChatsByTools(chat)


def _chat_with_tools(chat: ChatTokenizer, tools: list[dict[str, Any]] | None) -> tuple[ChatTokenizer, bool]:
    chat = chat.with_tools(tools)
    try:
        chat.rewrites_history = check_history(chat.renderer).rewrites_history
    except PenstockError:  # it knows no tools
        chat.rewrites_history = True
    return chat, not chat.rewrites_history  # else every turn is rendered as a whole, a row each
