"""Sample the turns that an agent requests, and record them as rows of one completion.

A program elsewhere (an environment server, an agent) holds the conversation and sends all of it with each request. Here
it becomes token ids, the worker's engine client samples the next turn, and the recorder keeps the tokens; the program
gets text. So the recorded tokens are the sampled ones, whatever the program sends back.

A request that continues a recorded turn (the same messages, the same answer, then new messages) extends its row by a
continuation. A rewritten history starts a new row; a compacted one, a sub-agent's conversation, or a second answer to
the same question, a new branch (`branches`). Each row holds exactly what the model saw when it sampled. Several
requests may be sampled at once: a turn is recorded when it has been sampled, in one step.
"""

import hashlib
import re
import secrets
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import anyio
from msgspec.structs import replace

from stream.errors import DataError, EngineError, EngineRefusedError, EngineUnavailableError
from stream.queue.in_flight import Activity
from stream.records import Branch, BranchRole, Completion, Failure, Message, Row
from stream.validity import RolloutReason, TruncationReason
from workers.rollout.agent_endpoint.branch_record import record_branches
from workers.rollout.agent_endpoint.branches import BranchBuilder, Branches, Place, conversation_of
from workers.rollout.agent_endpoint.chats_by_tools import KnownChat, chats_by_tools
from workers.rollout.agent_endpoint.messages import turn_message
from workers.rollout.agent_endpoint.neutral import (
    REASONING,
    ContextOverflowError,
    ModelReply,
    ModelRequest,
    RequestRefusedError,
)
from workers.rollout.agent_endpoint.roles import last_main
from workers.rollout.chat.chat_tokenizer import ChatTokenizer
from workers.rollout.chat.renderer import AssistantTurn
from workers.rollout.engine_client.sampling import SampledTurn, context_seed, cut_at_stop, end_after_error
from workers.rollout.episode import EpisodeContext, measure_time
from workers.rollout.episode_clock import EpisodeClock
from workers.rollout.token_ids import TokenIds
from workers.rollout.tool_formats.parsing import REASONING_TAGS, ParsedTurn, reasoning_end

_MAX_EMPTY_REPLIES = 3
"""Empty replies after a limit is reached, so that the program can finish by itself; then requests are refused."""
_MAX_PARALLEL = 16
"""Turns of an episode that are sampled at once; more wait, since a program might end on an error."""
_TURNS_OF_ALL, _TOKENS_OF_ALL = 16, 8
"""How many times `rollout.max_turns` and `rollout.max_tokens`, which hold for each branch, all branches may have."""
_MAX_ROWS = 256
"""Rows of an episode: a program that compacts again and again would otherwise sample without end."""
_MAX_OVERFLOWS = 100
"""Contexts of an episode that may be too long: a program whose history does not fit could otherwise ask without end."""
_LONGEST = re.compile(r"maximum (?:context|model) length (?:is|of) (\d+)")
"""How engines say the longest context that they take."""


class Recorder:
    """Samples and records one episode's turns.

    Args:
        context: of the episode.
        completion: receives messages, turns and counts.
        clock: of the episode.

    Attributes:
        error: set if no engine answers; it concerns all completions of the group.
    """

    def __init__(self, context: EpisodeContext, completion: Completion, clock: EpisodeClock) -> None:
        self.error: EngineUnavailableError | None = None
        self._context, self._completion, self._clock = context, completion, clock
        self._chats = chats_by_tools(context.chat)
        self._branches = Branches()
        self._failure: Failure | None = None
        self._stopped_at: tuple[int, TruncationReason] | None = None
        """Number of turns before the last conversation of the task that could not begin, and why."""
        self._refused_at: tuple[int, str] | None = None
        """Number of turns before the last request that was refused, and why."""
        self._overflows = 0
        self._empty_replies = Counter[BranchBuilder | None]()
        self._parallel = anyio.Semaphore(_MAX_PARALLEL, fast_acquire=True)
        self._scopes: set[anyio.CancelScope] = set()
        self._sampling, self._engine = 0, ExitStack()
        self._closed = False
        self._asked = Counter[bytes]()
        self._key = secrets.token_bytes(16)
        self._sent: dict[tuple[str, str], str] = {}
        """The content of each turn, by its reasoning and its text as programs got them apart."""

    def record(self) -> tuple[list[Row], list[Branch]]:
        """Return what was sampled, and its branches; each sampled token is in one row."""
        return record_branches(self._branches.branches, self._context.agents.train)

    def end(self) -> Failure | TruncationReason | None:
        """Return how a failed turn or a limit ended the episode; None if nothing did, or if the task went on."""
        if self._failure is not None:
            return self._failure
        turns = self._completion.turns
        if self._refused_at is not None and self._refused_at[0] == turns:
            return Failure(reason=RolloutReason.ENV_STEP, detail=f"a request was refused: {self._refused_at[1]}")
        if self._stopped_at is not None and self._stopped_at[0] == turns:
            return self._stopped_at[1]
        last = last_main(self._branches.branches)
        return last.limited if last is not None else None

    def versions(self) -> set[int]:
        """Return the policy versions that sampled so far."""
        return self._branches.versions()

    def note_refusal(self, why: str) -> None:
        """Note that a request was refused: if no turn follows, that is how the episode ended."""
        self._refused_at = (self._completion.turns, why)

    async def complete(self, request: ModelRequest) -> ModelReply:
        """Sample a turn.

        Raises:
            ContextOverflowError: the context is longer than the engine takes.
            RequestRefusedError: the chat template, or the record, cannot hold the request.
            EngineRefusedError: a limit is reached, or the episode is over.
            EngineError: the turn could not be sampled.
        """
        if not self._closed:
            with anyio.CancelScope() as scope:
                self._scopes.add(scope)
                try:
                    async with self._parallel:
                        return await self._complete(request)
                except RequestRefusedError as error:
                    self.note_refusal(str(error))
                    raise
                finally:
                    self._scopes.discard(scope)
        raise EngineRefusedError("the episode is over")

    async def count_tokens(self, request: ModelRequest) -> int:
        """Return the length of a request's context; nothing is sampled, and nothing is recorded."""
        known = await self._chats.get(request.tools)
        return len(await _encode(known.rules.apply(self._joined(request.messages)), known.chat))

    def close(self) -> None:
        """End the episode: refuse new requests, and cancel those that are being sampled."""
        self._closed = True
        for scope in self._scopes:
            scope.cancel()

    async def _complete(self, request: ModelRequest) -> ModelReply:
        known = await self._chats.get(request.tools)
        place = await self._find_place(known, request)
        limit = self._limit_reached(place)
        if limit is not None:
            return self._limit_reply(limit, place)
        tokens_left = self._context.limits.max_tokens - place.used
        starts_in_reasoning = place.chat.open_reasoning(place.context)
        sampled = await self._ask_engine(place, request, tokens_left)
        text = await place.chat.decode_turn(sampled.token_ids)
        spoken = AssistantTurn(sampled.token_ids, text, open_reasoning=starts_in_reasoning)
        shown = ParsedTurn(cut_at_stop(text, request.stop)[0])
        if request.tools:
            shown = self._context.tool_format.parse(shown.content, starts_in_reasoning=bool(starts_in_reasoning))
            shown = ParsedTurn(shown.content, shown.calls[:1], shown.errors) if request.one_call else shown
        if self._closed:  # what is recorded has been read
            raise EngineRefusedError("the episode is over")
        return self._record(place, sampled, spoken, shown)

    def _joined(self, messages: list[Message]) -> list[Message]:
        """Return the conversation with the reasoning of each turn in its content, as it was sampled."""
        joined = []
        for message in messages:
            if message["role"] == "assistant" and isinstance(message["content"], str):
                rest = {key: value for key, value in message.items() if key != REASONING}
                reasoning, text = str(message.get(REASONING, "")), message["content"]
                sent = self._sent.get((reasoning, text))
                joined.append(rest | {"content": _with_reasoning(reasoning, text) if sent is None else sent})
            else:
                joined.append(message)
        return joined

    async def _find_place(self, known: KnownChat, request: ModelRequest) -> Place:
        """Find the turn that a request continues, and make the tokens that the model is to see."""
        chat, messages = known.chat, known.rules.apply(self._joined(request.messages))
        try:
            asked = conversation_of(messages, known.digest, request.source, has_tools=bool(request.tools))
        except (ValueError, OverflowError, RecursionError) as error:
            raise RequestRefusedError(f"the request holds values that a record cannot hold: {error}") from error
        parent, count, branch = self._branches.find(asked)
        place = Place(asked, chat, parent, branch, messages[count:], TokenIds())
        if branch is not None:
            place.tip, place.known = branch.tip, len(branch.roles)
        await self._fill_context(place, known)
        if parent is None or branch is None or parent is not branch.tip:
            place.new_count = max(0, len(place.context) - branch.tip.end) if branch else 0
        return place

    async def _fill_context(self, place: Place, known: KnownChat) -> None:
        """Make the context of a request; known turns keep their sampled tokens."""
        chat, parent, added = place.chat, place.parent, place.added
        if parent is None or not known.takes_tools:
            place.context = await _encode(place.conversation.messages, chat)
            place.new_count = max(0, len(place.context) - parent.end) if parent else 0
            return
        prompt, turns = parent.conversation(added)
        try:
            if await chat.continues(prompt, turns):
                ids = await chat.encode_continuation(added, parent.ended_with_eos)
                place.context, place.new_count, place.continues = parent.context(), len(ids), True
                place.context.extend(ids)
                return
            place.context, place.new_count = await chat.encode_conversation(prompt, turns)
        except DataError as error:
            raise RequestRefusedError(str(error)) from error
        place.continues = parent.context().is_prefix_of(place.context)

    def _limit_reached(self, place: Place) -> TruncationReason | None:
        limits, agents, branches = self._context.limits, self._context.agents, self._branches
        most_turns = agents.max_rollout_turns or _TURNS_OF_ALL * limits.max_turns
        most_tokens = agents.max_rollout_tokens or _TOKENS_OF_ALL * limits.max_tokens
        if place.depth >= limits.max_turns or self._completion.turns >= most_turns:
            return TruncationReason.MAX_TURNS
        if place.used >= limits.max_tokens or branches.token_count() >= most_tokens:
            return TruncationReason.LENGTH
        return TruncationReason.LENGTH if branches.row_count() >= _MAX_ROWS else None

    async def _ask_engine(self, place: Place, request: ModelRequest, tokens_left: int) -> SampledTurn:
        """Sample a turn, within the limits of run, episode and request."""
        context, chat = self._context, place.chat
        if self._overflows >= _MAX_OVERFLOWS:
            self._note_limit(TruncationReason.CONTEXT, place)
            raise EngineRefusedError(f"the episode is over: {_MAX_OVERFLOWS} of its contexts were too long")
        most = min(context.limits.max_tokens_per_turn, tokens_left, request.max_tokens or tokens_left)
        options = context.sampling_options(0, max_tokens=most, stop_token_ids=chat.stop_token_ids)
        number = self._asked[place.digest]
        self._asked[place.digest] += 1
        if context.journal is not None and (known := context.journal.take_answer(place.digest, number)):
            return known
        seed = context_seed(context.seed, place.digest, number)
        options = replace(options, stop=(*options.stop, *request.stop), seed=seed)
        try:
            with self._engine_time():
                sampled = await context.sampler.sample(
                    place.context, options, min_policy_version=context.min_policy_version
                )
        except EngineUnavailableError as error:
            self.error = error
            raise
        except EngineError as error:
            end = end_after_error(error, self._completion.turns)
            if isinstance(end, Failure):
                self._failure = self._failure or end
            else:
                self._note_limit(end, place)
            if end is TruncationReason.CONTEXT or (
                isinstance(end, Failure) and end.reason is RolloutReason.PROMPT_TOO_LONG
            ):
                self._overflows += 1
                found = _LONGEST.search(str(error))
                raise ContextOverflowError(len(place.context), int(found[1]) - 1 if found else 0) from error
            raise
        if context.journal is not None:
            await context.journal.save_answer(place.digest, number, sampled)
        return sampled

    def _note_limit(self, reason: TruncationReason, place: Place) -> None:
        """Note the limit that a request has reached; it is the task's if no turn of the task follows."""
        asked = place.conversation
        if place.branch is not None:
            place.branch.limited = reason
            return
        is_task = place.parent is None and asked.source.role in {None, BranchRole.MAIN}
        if is_task and (asked.has_tools or not any(builder.has_tools for builder in self._branches.branches)):
            self._stopped_at = (self._completion.turns, reason)

    @contextmanager
    def _engine_time(self) -> Iterator[None]:
        """Let the engine's time run while at least one turn is sampled."""
        progress = self._context.progress
        if not self._sampling:
            self._engine.enter_context(measure_time(self._completion, "engine"))
            self._engine.enter_context(self._clock.engine)
            progress.activity = Activity.SAMPLING
        self._sampling += 1
        try:
            yield
        finally:
            self._sampling -= 1
            if not self._sampling:
                self._engine.close()
                progress.activity = Activity.OWN_LOOP

    def _record(self, place: Place, sampled: SampledTurn, spoken: AssistantTurn, shown: ParsedTurn) -> ModelReply:
        """Record a turn, in one step, and make the reply."""
        completion = self._completion
        parent = place.parent
        message = turn_message(shown, place.conversation.messages)
        cached_tokens = parent.end if parent is not None and place.continues else 0
        prompt_tokens = len(place.context)
        if self._failure is not None and self._failure.reason is RolloutReason.PROMPT_TOO_LONG:
            self._failure = None  # the program has shortened it
        if not completion.turns:
            completion.prompt_messages = place.added
        completion.messages += [*(place.said if completion.turns else ()), message]
        completion.turns += 1
        completion.tool_calls += len(shown.calls)
        completion.tool_errors += len(shown.errors)
        self._branches.add(place, sampled, spoken, message, len(completion.messages) - 1)
        end = reasoning_end(shown.content, starts_in_reasoning=bool(spoken.open_reasoning))
        reasoning = _without_tags(shown.content[:end])
        text = shown.content[end:].lstrip() if end else shown.content
        self._sent[reasoning, text] = shown.content
        return ModelReply(
            id=hashlib.blake2b(str(completion.turns).encode(), key=self._key, digest_size=9).hexdigest(),
            message=message,
            text=text,
            reasoning=reasoning,
            finish="length" if sampled.is_truncated else "calls" if shown.calls else "stop",
            prompt_tokens=prompt_tokens,
            completion_tokens=len(sampled.token_ids),
            reasoning_tokens=_tokens_of_text(place.chat, sampled.token_ids, end),
            cached_tokens=cached_tokens,
        )

    def _limit_reply(self, reason: TruncationReason, place: Place) -> ModelReply:
        """Return an empty reply once a limit is reached, so that the program can end by itself."""
        self._note_limit(reason, place)
        self._empty_replies[place.branch] += 1
        if self._empty_replies[place.branch] > _MAX_EMPTY_REPLIES:
            raise EngineRefusedError(f"the episode is over: its limit, {reason}, is reached")
        message: Message = {"role": "assistant", "content": ""}
        return ModelReply(id=secrets.token_hex(9), message=message, text="", finish="length")


async def _encode(messages: list[Message], chat: ChatTokenizer) -> TokenIds:
    try:
        return await chat.encode_prompt(messages)
    except DataError as error:
        raise RequestRefusedError(str(error)) from error


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
