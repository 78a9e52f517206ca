"""Sample the turns that an agent requests, and record them as rows of one completion.

A program elsewhere (an environment server, an agent) holds the conversation and sends all of it with each request. Here
it becomes token ids, the worker's engine client samples the next turn, and the recorder keeps the tokens; the program
gets text. So the recorded tokens are the sampled ones, whatever the program sends back.

A request that continues a recorded turn (the same messages, the same answer, then new messages) extends its row by a
continuation. Any other request (rewritten or compacted history, a sub-agent's conversation, a second answer to the same
question) starts a new row (`branches`). Each row holds exactly what the model saw when it sampled. Several requests may
be sampled at once: a turn is recorded when it has been sampled, in one step.
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
from stream.records import Completion, Failure, Message, Row
from stream.validity import RolloutReason, TruncationReason
from workers.rollout.agent_endpoint.branches import Branches, Place, Turn, digests_of
from workers.rollout.agent_endpoint.chats_by_tools import KnownChat, chats_by_tools
from workers.rollout.agent_endpoint.messages import turn_message
from workers.rollout.agent_endpoint.neutral import REASONING, ContextOverflowError, ModelReply, ModelRequest
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
_MAX_ROWS = 256
"""Rows of an episode: a program that compacts again and again would otherwise sample without end."""
_BRANCHES = 8
"""How many times `rollout.max_tokens` and `rollout.max_turns`, which hold for each branch, all branches together may
have."""
_LONGEST = re.compile(r"maximum (?:context|model) length (?:is|of) (\d+)")
"""How engines say the longest context that they take."""


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
        self._branches = Branches()
        self._empty_replies = Counter[Turn | None]()
        self._parallel = anyio.Semaphore(_MAX_PARALLEL)
        self._scopes: set[anyio.CancelScope] = set()
        self._sampling, self._engine = 0, ExitStack()
        self._closed = False
        self._asked = Counter[bytes]()
        self._key = secrets.token_bytes(16)
        self._sent: dict[tuple[str, str], str] = {}
        """The content of each turn, by its reasoning and its text as programs got them apart."""

    def rows(self) -> list[Row]:
        """Return what was sampled; each sampled token is in one row."""
        return self._branches.sampled_rows()

    def versions(self) -> set[int]:
        """Return the policy versions that sampled so far."""
        return self._branches.versions()

    async def complete(self, request: ModelRequest) -> ModelReply:
        """Sample a turn.

        Raises:
            ContextOverflowError: the context is longer than the engine takes.
            EngineRefusedError: the chat template refuses the request, a limit is reached, or the episode is over.
            EngineError: the turn could not be sampled.
        """
        if not self._closed:
            with anyio.CancelScope() as scope:
                self._scopes.add(scope)
                try:
                    async with self._parallel:
                        return await self._complete(request)
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
        place = await self._find_place(known, known.rules.apply(self._joined(request.messages)))
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

    async def _find_place(self, known: KnownChat, messages: list[Message]) -> Place:
        """Find the turn that a request continues, and make the tokens that the model is to see."""
        chat = known.chat
        try:
            digests = digests_of(messages, known.digest)
        except (ValueError, OverflowError, RecursionError) as error:
            raise EngineRefusedError(f"the request holds values that a record cannot hold: {error}") from error
        found = self._branches.find(digests)
        if found is None:
            return Place(None, messages, chat, digests[-1], await _encode(messages, chat), 0)
        parent, count = found
        added = messages[count:]
        if not known.takes_tools:
            context = await _encode(messages, chat)
            return Place(parent, added, chat, digests[-1], context, max(0, len(context) - parent.end))
        prompt, turns = parent.conversation(added)
        try:
            if await chat.continues(prompt, turns):
                ids = await chat.encode_continuation(added, parent.ended_with_eos)
                context = parent.context()
                context.extend(ids)
                return Place(parent, added, chat, digests[-1], context, len(ids), continues=True)
            context, new_count = await chat.encode_conversation(prompt, turns)
        except DataError as error:
            raise EngineRefusedError(str(error)) from error
        continues = parent.context().is_prefix_of(context)
        return Place(parent, added, chat, digests[-1], context, new_count, continues)

    def _limit_reached(self, place: Place) -> TruncationReason | None:
        limits, completion, branches = self._context.limits, self._completion, self._branches
        if place.depth >= limits.max_turns or completion.turns >= _BRANCHES * limits.max_turns:
            return TruncationReason.MAX_TURNS
        if place.used >= limits.max_tokens or branches.token_count() >= _BRANCHES * limits.max_tokens:
            return TruncationReason.LENGTH
        return TruncationReason.LENGTH if len(branches.rows) >= _MAX_ROWS else None

    async def _ask_engine(self, place: Place, request: ModelRequest, tokens_left: int) -> SampledTurn:
        """Sample a turn, within the limits of run, episode and request."""
        context, chat = self._context, place.chat
        most = min(context.limits.max_tokens_per_turn, tokens_left, request.max_tokens or tokens_left)
        options = context.sampling_options(0, max_tokens=most, stop_token_ids=chat.stop_token_ids)
        seed = context_seed(context.seed, place.digest, self._asked[place.digest])
        self._asked[place.digest] += 1
        options = replace(options, stop=(*options.stop, *request.stop), seed=seed)
        try:
            with self._engine_time():
                return await context.sampler.sample(
                    place.context, options, min_policy_version=context.min_policy_version
                )
        except EngineUnavailableError as error:
            self.error = error
            raise
        except EngineError as error:
            end = end_after_error(error, self._completion.turns)
            self._record_end(end)
            if end is TruncationReason.CONTEXT or (
                isinstance(end, Failure) and end.reason is RolloutReason.PROMPT_TOO_LONG
            ):
                found = _LONGEST.search(str(error))
                raise ContextOverflowError(len(place.context), int(found[1]) - 1 if found else 0) from error
            raise

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
        before = [] if parent is None else [m for turn in parent.path() for m in (*turn.added, turn.message)]
        message = turn_message(shown, [*before, *place.added])
        cached_tokens = parent.end if parent is not None and place.continues else 0
        prompt_tokens = len(place.context)
        if self.end is TruncationReason.CONTEXT:  # the program has shortened its history
            self.end = None
        if not completion.turns:
            completion.prompt_messages = place.added
        completion.messages += [*(place.added if completion.turns else ()), message]
        completion.turns += 1
        completion.tool_calls += len(shown.calls)
        completion.tool_errors += len(shown.errors)
        self._branches.add(place, sampled, spoken, message)
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

    def _record_end(self, end: Failure | TruncationReason) -> None:
        """Record how the episode ends; a failure outweighs a limit."""
        if isinstance(end, Failure) or not isinstance(self.end, Failure):
            self.end = end

    def _limit_reply(self, reason: TruncationReason, place: Place) -> ModelReply:
        """Return an empty reply once a limit is reached; one of a sub-agent's conversation does not end the episode."""
        root = place.parent.root if place.parent else None
        if root is None or root is self._branches.first:
            self._record_end(reason)
        self._empty_replies[root] += 1
        if self._empty_replies[root] > _MAX_EMPTY_REPLIES:
            raise EngineRefusedError(f"the episode is over: its limit, {reason}, is reached")
        message: Message = {"role": "assistant", "content": ""}
        return ModelReply(id=secrets.token_hex(9), message=message, text="", finish="length")


async def _encode(messages: list[Message], chat: ChatTokenizer) -> TokenIds:
    try:
        return await chat.encode_prompt(messages)
    except DataError as error:
        raise EngineRefusedError(str(error)) from error


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
