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
from workers.rollout.chat.chat import Chat
from workers.rollout.chat.history import examine
from workers.rollout.draft import Draft
from workers.rollout.ends import timed
from workers.rollout.engine.answer import cut_off
from workers.rollout.engine.sampling import Sampler, Sampling, ending_of, turn_seed
from workers.rollout.led.openai_messages import Said, as_heard, read_messages
from workers.rollout.tool_formats.turn import ParsedTurn, ToolFormat
from workers.settings import Rollout

_MAX_SILENT = 3
"""Empty turns that a program gets once a limit is reached, so that it may end by itself; then it is refused."""
_MAX_TOOL_SETS = 64
"""Different lists of tools that are remembered; a model and an environment mostly have one."""


@dataclass(slots=True)
class _Thread:
    """One line of conversation, which is one row."""

    draft: Draft
    chat: Chat
    messages: list[Message] = field(default_factory=list)
    """As the program sent them, the model's last answer included."""
    ended: bool = True
    """The last turn ended with the template's own token."""


class Recorder:
    """One episode's turns.

    Args:
        completion: gains messages, turns and rows.
        chats: of the model, by the tools that a request brings.
        sampler: samples tokens.
        limits: of tokens and turns.
        tool_format: how the model writes tool calls.
        at_least: the oldest policy version that may sample.
        seed: of the episode.
        group: that it belongs to.

    Attributes:
        failure: why nobody knows what the policy would have done.
        error: about all completions alike.
    """

    def __init__(
        self,
        completion: Completion,
        chats: "Chats",
        sampler: Sampler,
        limits: Rollout,
        tool_format: ToolFormat,
        at_least: int,
        seed: int = 0,
        group: str = "",
    ) -> None:
        self.completion = completion
        self.failure: Failure | None = None
        self.error: EngineUnavailableError | None = None
        self._chats, self._sampler, self._limits = chats, sampler, limits
        self._tool_format, self._at_least, self._seed, self._group = tool_format, at_least, seed, group
        self._threads: list[_Thread] = []
        self._silent = 0
        self._turn = anyio.Lock()
        self._saying = anyio.CancelScope()
        self._over = False
        self._last: tuple[bytes, Said] | None = None

    def rows(self) -> list[Row]:
        """What was sampled, a row to each line of conversation."""
        return [row for thread in self._threads if (row := thread.draft.row()) is not None]

    async def say(self, request: Mapping[str, Any], *, again: bool = False) -> Said:
        """Sample a turn.

        Args:
            request: of OpenAI's chat completions; `messages` and `tools` are read.
            again: the program repeats a request whose answer did not reach it; the same answer is given once more.

        Raises:
            EngineRefusedError: a fact about the request, or a limit, or the episode is over.
            EngineError: it could not be sampled.
        """
        async with self._turn:  # a program may have several agents; a line of conversation has one end
            if not self._over:
                with anyio.CancelScope() as self._saying:
                    return await self._say(request, again=again)
            raise EngineRefusedError("the episode is over")

    def close(self) -> None:
        """The episode is over: no turn is added any more, and one that is being sampled is given up."""
        self._over = True
        self._saying.cancel()

    async def _say(self, request: Mapping[str, Any], *, again: bool) -> Said:
        messages = read_messages(request.get("messages"))
        try:
            key = msgspec.msgpack.encode([messages, request.get("tools") or []])
        except (ValueError, OverflowError, RecursionError) as error:
            raise EngineRefusedError(f"the request holds what no record can: {error}") from error
        if again and self._last is not None and self._last[0] == key:
            return self._last[1]
        if self.completion.turns >= self._limits.max_turns:
            return self._nothing_more(TruncationReason.MAX_TURNS)
        chat, continues = await self._chats.of(request.get("tools") or None)
        thread = self._going_on(messages, chat) if continues else None
        draft = await self._read(messages, chat, thread)
        left = self._limits.max_tokens - sum(len(each.draft) for each in self._threads if each is not thread)
        left -= len(draft)
        if left <= 0:
            return self._nothing_more(TruncationReason.LENGTH)
        said = await self._sample(draft, chat, left, thread, messages, tools=bool(request.get("tools")))
        self._last = key, said
        return said

    def _going_on(self, messages: list[Message], chat: Chat) -> _Thread | None:
        """The line of conversation that this request continues."""
        for thread in self._threads:
            known = len(thread.messages)
            new = messages[known:]
            if thread.chat is chat and new and messages[:known] == thread.messages:
                return thread
        return None

    async def _read(self, messages: list[Message], chat: Chat, thread: _Thread | None) -> Draft:
        """The tokens that the model is to see: the line's own, and what is new; or all of them, anew."""
        try:
            if thread is None:
                return Draft(await chat.encode_prompt(messages))
            ids = await chat.encode_continuation(messages[len(thread.messages) :], thread.ended)
        except DataError as error:
            raise EngineRefusedError(str(error)) from error
        longer = copy.deepcopy(thread.draft)  # what could not be sampled leaves no trace
        longer.see(ids)
        return longer

    async def _sample(
        self, draft: Draft, chat: Chat, left: int, thread: _Thread | None, messages: list[Message], *, tools: bool
    ) -> Said:
        sampling = Sampling.of(
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
                sampled = await self._sampler.sample(context, sampling, at_least=self._at_least)
            draft.sample(sampled)
        except EngineUnavailableError as error:
            self.error = error
            raise
        except EngineError as error:
            self._end(ending_of(error, self.completion.turns))
            raise
        text = chat.decode(sampled.token_ids)
        thinking = bool(chat.begun_thought(context))
        turn = self._tool_format.parse(text, thinking=thinking) if tools else ParsedTurn(text)
        message = as_heard(turn, messages)
        if thread is None:
            thread = _Thread(draft, chat)
            self._threads.append(thread)
        self._note(messages, message, turn)
        thread.draft, thread.messages = draft, [*messages, message]
        thread.ended = sampled.token_ids[-1:] == [chat.end_of_turn_id]
        cut = cut_off(sampled.finish_reason)
        reason = "length" if cut else "tool_calls" if turn.calls else "stop"
        return Said(message, reason, len(context), len(sampled.token_ids))

    def _note(self, messages: list[Message], said: Message, turn: ParsedTurn) -> None:
        """Keep the conversation for people and reward functions, in the order in which it was had."""
        completion = self.completion
        if not completion.turns:
            completion.prompt_messages = messages
        told = [*completion.prompt_messages, *completion.messages]
        common = next((i for i, (a, b) in enumerate(zip(told, messages, strict=False)) if a != b), len(told))
        completion.messages += [*messages[common:], said]
        completion.turns += 1
        completion.tool_calls += len(turn.calls)
        completion.tool_errors += len(turn.errors)

    def _end(self, ending: Failure | TruncationReason) -> None:
        if isinstance(ending, Failure):
            self.failure = ending
        else:
            self.completion.truncated = ending

    def _nothing_more(self, reason: TruncationReason) -> Said:
        self._end(reason)
        self._silent += 1
        if self._silent > _MAX_SILENT:
            raise EngineRefusedError(f"the episode is over: its limit, {reason}, is reached")
        return Said({"role": "assistant", "content": ""}, "length")


class Chats:
    """One model's chat with whatever tools requests bring, and whether its template can go on after a turn."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._known: dict[bytes, tuple[Chat, bool]] = {}

    async def of(self, tools: list[dict[str, Any]] | None) -> tuple[Chat, bool]:
        """The chat with these tools."""
        key = msgspec.json.encode(tools)
        if key not in self._known:
            if len(self._known) >= _MAX_TOOL_SETS:
                self._known.clear()
            self._known[key] = await anyio.to_thread.run_sync(partial(_with, self._chat, tools))
        return self._known[key]


@lru_cache(maxsize=32)
def chats_of(chat: Chat) -> Chats:
    """The same for every group of an environment, so that its tools are looked at once."""
    return Chats(chat)


def _with(chat: Chat, tools: list[dict[str, Any]] | None) -> tuple[Chat, bool]:
    chat = chat.with_tools(tools)
    try:
        chat.forks = examine(chat.conversation).forks
    except PenstockError:  # it knows no tools
        chat.forks = True
    return chat, not chat.forks  # else every turn is rendered as a whole, a row each
