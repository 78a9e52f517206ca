"""Sample the turns that an agent requests, and record them as rows of one completion.

A program elsewhere (an environment server, an agent) holds the conversation and sends all of it with each request. Here
it becomes token ids, the worker's engine client samples the next turn, and the recorder keeps the tokens; the program
gets text. So the recorded tokens are the sampled ones, whatever the program sends back.

A request that continues a recorded conversation (the same messages, the same answer, then new messages) extends its row
by a continuation. Any other request (rewritten or compacted history, another agent's conversation, or a chat template
that cannot continue) starts a new row. Each row holds exactly what the model saw when it sampled.
"""

import hashlib
import re
import secrets
from bisect import bisect_left
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

import anyio
import msgspec
from msgspec.structs import replace

from stream.errors import DataError, EngineError, EngineRefusedError, EngineUnavailableError, PenstockError
from stream.queue.in_flight import Activity
from stream.records import Completion, Failure, Message, Row
from stream.validity import RolloutReason, TruncationReason
from workers.rollout.agent_endpoint.messages import turn_message
from workers.rollout.agent_endpoint.neutral import REASONING, ContextOverflowError, ModelReply, ModelRequest
from workers.rollout.agent_endpoint.role_rules import RoleRules, find_role_rules
from workers.rollout.chat.chat_tokenizer import ChatTokenizer
from workers.rollout.chat.renderer import AssistantTurn
from workers.rollout.engine_client.sampling import SampledTurn, cut_at_stop, end_after_error
from workers.rollout.episode import EpisodeContext, measure_time
from workers.rollout.episode_clock import EpisodeClock
from workers.rollout.rows import RowBuilder
from workers.rollout.token_ids import TokenIds
from workers.rollout.tool_formats.parsing import REASONING_TAGS, ParsedTurn, reasoning_end

_MAX_EMPTY_REPLIES = 3
"""Empty replies after a limit is reached, so that the program can finish by itself; then requests are refused."""
_MAX_TOOL_SETS = 64
"""Distinct lists of tools to cache; a model and an environment mostly have one."""
_LONGEST = re.compile(r"maximum (?:context|model) length (?:is|of) (\d+)")
"""How engines say the longest context that they take."""


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
        end: how a failed turn or a limit ended the episode; None while nothing did, or if a turn followed.
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
        self._last_reply: tuple[bytes, ModelReply] | None = None
        self._key = secrets.token_bytes(16)
        self._sent: dict[tuple[str, str], str] = {}
        """The content of each turn, by its reasoning and its text as programs got them apart."""

    def rows(self) -> list[Row]:
        """Return what was sampled, one row per branch."""
        return [row for branch in self._branches if (row := branch.row.row()) is not None]

    def versions(self) -> set[int]:
        """Return the policy versions that sampled so far."""
        return set().union(*(branch.row.versions() for branch in self._branches))

    async def complete(self, request: ModelRequest) -> ModelReply:
        """Sample a turn. A repeated request gets the same answer.

        Raises:
            ContextOverflowError: the context is longer than the engine takes.
            EngineRefusedError: the chat template refuses the request, a limit is reached, or the episode is over.
            EngineError: the turn could not be sampled.
        """
        async with self._turn_lock:  # a program may have several agents, but a branch grows at one end
            if not self._closed:
                with anyio.CancelScope() as self._request_scope:
                    return await self._complete(request)
            raise EngineRefusedError("the episode is over")

    async def count_tokens(self, request: ModelRequest) -> int:
        """Return the length of a request's context; nothing is sampled, and nothing is recorded."""
        chat = await self._chats.get(request.tools)
        return len(await self._encode(chat.rules.apply(self._joined(request.messages)), chat.chat))

    def close(self) -> None:
        """End the episode: refuse new requests, and cancel the one that is being sampled."""
        self._closed = True
        self._request_scope.cancel()

    async def _complete(self, request: ModelRequest) -> ModelReply:
        try:
            key = msgspec.msgpack.encode([request.messages, request.tools])
        except (ValueError, OverflowError, RecursionError) as error:
            raise EngineRefusedError(f"the request holds values that a record cannot hold: {error}") from error
        if request.is_retry and self._last_reply is not None and self._last_reply[0] == key:
            return self._last_reply[1]
        limits = self._context.limits
        if self._completion.turns >= limits.max_turns:
            return self._limit_reply(TruncationReason.MAX_TURNS)
        known = await self._chats.get(request.tools)
        messages = known.rules.apply(self._joined(request.messages))
        branch = await self._find_branch(messages, known.chat) if known.continues else None
        row = await self._render(messages, known.chat, branch)
        tokens_left = limits.max_tokens - sum(len(other.row) for other in self._branches if other is not branch)
        tokens_left -= len(row)
        if tokens_left <= 0:
            return self._limit_reply(TruncationReason.LENGTH)
        reply = await self._sample(branch or _Branch(row, known.chat), row, messages, request, tokens_left)
        self._last_reply = key, reply
        return reply

    def _joined(self, messages: list[Message]) -> list[Message]:
        """Return the conversation with the reasoning of each turn in its content, as it was sampled."""
        joined = []
        for message in messages:
            if message["role"] == "assistant" and isinstance(message["content"], str):
                rest = {key: value for key, value in message.items() if key != REASONING}
                reasoning, text = str(message.get(REASONING, "")), message["content"]
                joined.append(rest | {"content": self._sent.get((reasoning, text)) or _with_reasoning(reasoning, text)})
            else:
                joined.append(message)
        return joined

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
        if branch is None:
            return RowBuilder(await self._encode(messages, chat))
        try:
            ids = await chat.encode_continuation(messages[len(branch.messages) :], branch.ended_with_eos)
        except DataError as error:
            raise EngineRefusedError(str(error)) from error
        row = branch.row.copy()  # a request that cannot be sampled leaves no trace
        row.append_context(ids)
        return row

    async def _encode(self, messages: list[Message], chat: ChatTokenizer) -> TokenIds:
        try:
            return await chat.encode_prompt(messages)
        except DataError as error:
            raise EngineRefusedError(str(error)) from error

    async def _sample(
        self, branch: _Branch, row: RowBuilder, messages: list[Message], request: ModelRequest, tokens_left: int
    ) -> ModelReply:
        """Sample the next turn of a branch, and record it there."""
        chat, prompt_ids = branch.chat, row.context()
        prompt_length, starts_in_reasoning = len(prompt_ids), bool(chat.open_reasoning(prompt_ids))
        sampled = await self._ask_engine(chat, prompt_ids, request, tokens_left)
        text, _ = cut_at_stop(await chat.decode_turn(sampled.token_ids), request.stop)
        cached_tokens = len(branch.row.context()) if branch in self._branches else 0
        row.append_sample(sampled)
        turn = ParsedTurn(text)
        if request.tools:
            turn = self._context.tool_format.parse(text, starts_in_reasoning=starts_in_reasoning)
            turn = ParsedTurn(turn.content, turn.calls[:1], turn.errors) if request.one_call else turn
        message = turn_message(turn, messages)
        self._record_turn(messages, message, turn)
        if branch not in self._branches:
            self._branches.append(branch)
        branch.prompt = branch.prompt or messages
        turns = branch.turns_before(messages) if branch.turns else []
        branch.turns = [*turns, AssistantTurn(sampled.token_ids, text)]
        branch.row, branch.messages = row, [*messages, message]
        branch.ended_with_eos = sampled.token_ids[-1:] == [chat.end_of_turn_id]
        end = reasoning_end(turn.content, starts_in_reasoning=starts_in_reasoning)
        reasoning, visible = _without_tags(turn.content[:end]), turn.content[end:].lstrip() if end else turn.content
        self._sent[reasoning, visible] = turn.content
        return ModelReply(
            id=hashlib.blake2b(str(self._completion.turns).encode(), key=self._key, digest_size=9).hexdigest(),
            message=message,
            text=visible,
            reasoning=reasoning,
            finish="length" if sampled.is_truncated else "calls" if turn.calls else "stop",
            prompt_tokens=prompt_length,
            completion_tokens=len(sampled.token_ids),
            reasoning_tokens=_tokens_of_text(chat, sampled.token_ids, end),
            cached_tokens=cached_tokens,
        )

    async def _ask_engine(
        self, chat: ChatTokenizer, prompt_ids: TokenIds, request: ModelRequest, tokens_left: int
    ) -> SampledTurn:
        """Sample a turn, within the limits of run, episode and request."""
        context, completion = self._context, self._completion
        most = min(context.limits.max_tokens_per_turn, tokens_left, request.max_tokens or tokens_left)
        options = context.sampling_options(completion.turns, max_tokens=most, stop_token_ids=chat.stop_token_ids)
        context.progress.activity = Activity.SAMPLING
        try:
            with measure_time(completion, "engine"), self._clock.engine:
                return await context.sampler.sample(
                    prompt_ids,
                    replace(options, stop=(*options.stop, *request.stop)),
                    min_policy_version=context.min_policy_version,
                )
        except EngineUnavailableError as error:
            self.error = error
            raise
        except EngineError as error:
            end = end_after_error(error, completion.turns)
            self._record_end(end)
            if end is TruncationReason.CONTEXT or (
                isinstance(end, Failure) and end.reason is RolloutReason.PROMPT_TOO_LONG
            ):
                found = _LONGEST.search(str(error))
                raise ContextOverflowError(len(prompt_ids), int(found[1]) - 1 if found else 0) from error
            raise
        finally:
            context.progress.activity = Activity.OWN_LOOP

    def _record_turn(self, messages: list[Message], message: Message, turn: ParsedTurn) -> None:
        """Append the conversation to the completion, for people and reward functions, in the order it happened."""
        completion = self._completion
        if self.end is TruncationReason.CONTEXT:  # the program has shortened its history
            self.end = None
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

    def _limit_reply(self, reason: TruncationReason) -> ModelReply:
        """Return an empty reply once a limit is reached."""
        self._record_end(reason)
        self._empty_replies += 1
        if self._empty_replies > _MAX_EMPTY_REPLIES:
            raise EngineRefusedError(f"the episode is over: its limit, {reason}, is reached")
        message: Message = {"role": "assistant", "content": ""}
        return ModelReply(id=secrets.token_hex(9), message=message, text="", finish="length")


class _KnownChat(NamedTuple):
    """A model's chat with a list of tools."""

    chat: ChatTokenizer
    continues: bool
    """Conversations continue in one row."""
    rules: RoleRules


class ChatsByTools:
    """One model's chat with the tools of each request, and what its template can do with them."""

    def __init__(self, chat: ChatTokenizer) -> None:
        self._chat = chat
        self._cache: dict[bytes, _KnownChat] = {}

    async def get(self, tools: list[dict[str, Any]] | None) -> _KnownChat:
        """Return the chat with these tools."""
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


def _chat_with_tools(chat: ChatTokenizer, tools: list[dict[str, Any]] | None) -> _KnownChat:
    """Return the chat; where conversations do not continue, each turn is rendered as a whole, in its own row."""
    chat = chat.with_tools(tools)
    rules = find_role_rules(chat)
    try:
        history = chat.check_history(with_user_replies=True)
        if history.rewrites_history:  # perhaps after a user message only, as many templates do
            chat.check_history()
    except PenstockError:  # the template knows no tools
        return _KnownChat(chat, False, rules)
    return _KnownChat(chat, not chat.rewrites_history, rules)


def _without_tags(reasoning: str) -> str:
    """Return the reasoning of a turn as programs show it."""
    shown = reasoning.strip()
    for opening, closing in REASONING_TAGS:
        shown = shown.removeprefix(opening).removesuffix(closing)
    return shown.strip()


def _with_reasoning(reasoning: str, text: str) -> str:
    """Return the content of a turn that was not sampled here."""
    opening, closing = REASONING_TAGS[0]
    return f"{opening}\n{reasoning}\n{closing}\n\n{text}" if reasoning else text


def _tokens_of_text(chat: ChatTokenizer, ids: list[int], characters: int) -> int:
    """Return how many tokens make the first characters of a turn."""
    return (
        bisect_left(range(len(ids)), characters, key=lambda count: len(chat.decode(ids[:count]))) if characters else 0
    )
