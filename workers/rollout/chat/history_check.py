"""Check on sample conversations whether a chat template only appends, or rewrites earlier turns.

With a template that only appends, a conversation continues token by token in one row. A template that rewrites earlier
turns (drops their reasoning, or moves the system message) shows the model a different text at each turn; the completion
then gets several rows, each with exactly what the model saw when it sampled.

Check whether a template that only appends to sample conversations also only appends to a real one.

A template may look at what no sample has: SmolLM3's writes another start of a turn after a system message with
`/no_think`. So each prompt is compared once, with two sample turns, and each conversation at its 4th, 8th, 16th, ...
turn, and whenever it gets replies of a new kind, such as a system message. As in the samples, the model's own texts are
replaced: what is compared is what the template writes around them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import msgspec
import structlog
from jinja2 import Environment

from stream.errors import DataError, PenstockError
from stream.records import Message
from workers.rollout.chat.renderer import AssistantTurn, ConversationRenderer
from workers.rollout.tool_formats.parsing import REASONING_TAGS

_CONTEXT_CHARACTERS: Final = 40
_PLAIN_TURNS: Final = 4
"""Turns before the first text that a template looks for, which may change how they are rendered."""
_TEXTS_PER_SAMPLE: Final = 12
_MAX_TEXT: Final = 80
"""Longer texts of a template are instructions, which it compares nothing with."""
_MAX_TURNS: Final = 66
"""Templates with numbers above 64 do not count turns with them."""
_TEXTS: Final = ("", "\n", " 42\n", "null", "[]", "{}", '{"a": [1, "b"]}')
"""Contents that a template may treat differently, besides those that its source names."""


@dataclass(frozen=True, slots=True)
class HistoryCheck:
    """Whether a template rewrites earlier turns.

    Attributes:
        rewrites_history: it does.
        reason: explanation for people; if it rewrites, the first difference.
        turn_start: how a turn starts that the template leaves as it is: the part in the generation prompt, and the
            sampled part.
        ignores_space: white space differed.
    """

    rewrites_history: bool
    reason: str
    turn_start: tuple[str, str] = ("", "")
    ignores_space: bool = False


def check_history(
    renderer: ConversationRenderer, *, with_tools: bool = True, with_user_replies: bool = False
) -> HistoryCheck:
    """Compare sample conversations, rendered as a whole, with the same rendered turn by turn.

    A difference in white space alone does not count as rewriting: one row per turn is a high price for a line break.

    Args:
        renderer: the model's template with an environment's tools.
        with_tools: the conversations have tool calls.
        with_user_replies: the environment answers turns with user messages (`respond`). Many templates drop a turn's
            reasoning once a user message follows it, though not after a tool message.

    Raises:
        DataError: the template refuses tool messages.
        PenstockError: it leaves them out, so that no model would read its tools' results.
    """
    samples = _TOOL_SAMPLES * with_tools + _USER_SAMPLES * with_user_replies
    samples += _MIXED_SAMPLES * (with_tools and with_user_replies)
    checks = [_check_variant(renderer, samples, start) for start in reasoning_variants(renderer)]
    best = min(checks, key=lambda check: (check.rewrites_history, check.ignores_space))  # the first of the equal ones
    if best.rewrites_history:
        return best
    roles = ["tool"] * with_tools + ["user"] * with_user_replies
    more = (_check_texts(renderer, best, role) for role in roles)
    return next((check for check in more if check is not None), best)


def reasoning_variants(renderer: ConversationRenderer) -> list[tuple[str, str]]:
    """Return how a turn of this model may start: the part in the generation prompt, and the sampled part.

    A template that knows reasoning is tested with it, in each of the usual line breaks. If it writes an empty block
    into a turn without reasoning, that does no harm: such a model always reasons.
    """
    prompt = renderer.render_prompt(_ASK)[-_CONTEXT_CHARACTERS:]
    for opening, closing in REASONING_TAGS:
        if opening not in renderer.template.source and closing not in renderer.template.source:
            continue
        if closing in prompt:
            break
        endings = [f"Easy.{ending}" for ending in (f"\n{closing}\n\n", f"\n{closing}\n", closing)]
        if opening in prompt:
            return [(start, ending) for ending in endings for start in (f"{opening}\n", "")]
        return [("", f"{opening}\n{ending}") for ending in endings]
    return [("", "")]


def _check_variant(renderer: ConversationRenderer, samples: "list[_Sample]", start: tuple[str, str]) -> HistoryCheck:
    """Check conversations whose turns start so."""
    opening, reasoning = start
    spaced = None
    for prompt, rounds in samples:
        if prompt is not _ASK and not renderer.accepts(prompt):
            continue  # a template without system messages
        turns: list[AssistantTurn] = []
        for text, replies in rounds:
            turns.append(AssistantTurn((), reasoning + text, replies, opening))
            whole = renderer.render_whole(prompt, turns)
            if not all(str(reply["content"]) in whole for reply in replies):
                raise PenstockError(
                    f"the chat template of {renderer.template.folder} leaves out {replies[0]['role']} messages, so "
                    f"that the model would not read them; use a template that knows the role {replies[0]['role']!r}"
                )
            found = find_difference(renderer, prompt, turns)
            if found is not None and not found.in_space:
                return HistoryCheck(True, found.text, start)
            spaced = spaced or found
    if spaced is not None:
        reason = f"only white space differs when the whole is rendered: {spaced.text}"
        return HistoryCheck(False, reason, start, ignores_space=True)
    return HistoryCheck(False, "a conversation rendered as a whole is what the model saw turn by turn", start)


def _check_texts(renderer: ConversationRenderer, check: HistoryCheck, role: str) -> HistoryCheck | None:
    """Check conversations whose replies hold each text in the template's source; None if it rewrites none of them.

    The first one has more turns than any small number that the template may compare them with.
    """
    tokens = Environment(extensions=["jinja2.ext.loopcontrols"]).lex(renderer.template.source)  # noqa: S701
    named = {str(text)[1:-1] for _, kind, text in tokens if kind == "string" and len(str(text)) <= _MAX_TEXT}
    texts = [*_TEXTS, *sorted(named)]
    samples = [texts[start : start + _TEXTS_PER_SAMPLE] for start in range(0, len(texts), _TEXTS_PER_SAMPLE)]
    opening, reasoning = check.turn_start
    for special in [[], *samples]:
        contents = ["3."] * (_PLAIN_TURNS if special else _MAX_TURNS) + special
        replies = [tool_reply(text, i) if role == "tool" else _user_message(text) for i, text in enumerate(contents)]
        turns = [AssistantTurn((), f"{reasoning}Step {i}.", [reply], opening) for i, reply in enumerate(replies)]
        try:
            for found in _differences(renderer, _ASK, turns, first=len(turns) if special else 1):
                if found is not None and not (found.in_space and check.ignores_space):
                    return HistoryCheck(True, found.text, check.turn_start)
        except DataError:  # the template refuses this one
            continue
    return None


@dataclass(frozen=True, slots=True)
class RenderingDifference:
    """The first difference between two renderings of a conversation, for people, and whether all are in white space."""

    text: str
    in_space: bool


def find_difference(
    renderer: ConversationRenderer, messages: Sequence[Message], turns: Sequence[AssistantTurn]
) -> RenderingDifference | None:
    """Compare a conversation rendered as a whole with the same rendered turn by turn.

    Args:
        renderer: the model's template with an environment's tools.
        messages: the prompt.
        turns: everything after it.

    Raises:
        DataError: the template refuses the conversation.
    """
    *_, last = _differences(renderer, messages, turns, first=len(turns))
    return last


def _differences(
    renderer: ConversationRenderer, messages: Sequence[Message], turns: Sequence[AssistantTurn], first: int
) -> Iterator[RenderingDifference | None]:
    """Compare the conversation after each turn, from number `first` on; each continuation is rendered once."""
    seen = ""
    for count in range(len(turns) + 1):
        try:
            if count:
                seen += turns[count - 1].text + renderer.render_continuation(turns[count - 1].replies)
            else:
                seen = renderer.render_prompt(messages)
        except DataError:
            raise
        except PenstockError as error:
            yield RenderingDifference(str(error), in_space=False)
            return
        if count >= first:
            yield _compare(renderer.render_whole(messages, turns[:count]), seen)


def _compare(whole: str, seen: str) -> RenderingDifference | None:
    if whole == seen:
        return None
    return RenderingDifference(_first_difference(whole, seen), in_space="".join(whole.split()) == "".join(seen.split()))


def _first_difference(whole: str, pieces: str) -> str:
    place = next((i for i, (a, b) in enumerate(zip(whole, pieces, strict=False)) if a != b), None)
    place = min(len(whole), len(pieces)) if place is None else place
    around = slice(max(0, place - _CONTEXT_CHARACTERS), place + _CONTEXT_CHARACTERS)
    return f"first difference at character {place}: the whole says {whole[around]!r}, the turns said {pieces[around]!r}"


def tool_reply(text: str, number: int = 1) -> Message:
    """Return the result of a call."""
    return {"role": "tool", "name": "add", "tool_call_id": f"call{number:05}", "content": text}


def _user_message(text: str) -> Message:
    return {"role": "user", "content": text}


_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
_ASK: list[Message] = [{"role": "user", "content": "What is 1 + 2?"}]
_Sample = tuple[list[Message], list[tuple[str, list[Message]]]]
"""A prompt, and the rounds after it: a turn's text, and the messages that follow it."""
_TOOL_SAMPLES: list[_Sample] = [
    (
        _ASK,
        [
            (_CALL, [tool_reply("3.")]),
            ("Once more.\n" + _CALL, [tool_reply("4."), tool_reply("5.", 2)]),
            (_CALL, [tool_reply("6.")]),
        ],
    ),
    (
        [{"role": "system", "content": "Be brief."}, *_ASK],
        [(f"{_CALL}\n{_CALL}", [tool_reply("7."), tool_reply("8.", 2)])],
    ),
]
"""Conversations with several calls, several turns, and a system message."""
_USER_SAMPLES: list[_Sample] = [
    (
        _ASK,
        [
            ("It is 3.", [_user_message("Are you sure?")]),
            ("Quite sure.", [_user_message("Say it again.")]),
            ("Three.", [_user_message("Thanks.")]),
        ],
    ),
    ([{"role": "system", "content": "Be brief."}, *_ASK], [("3.", [_user_message("And 2 + 2?")])]),
]
"""Conversations in which an environment answers the turns as a user."""
_MIXED_SAMPLES: list[_Sample] = [
    (
        _ASK,
        [(_CALL, [tool_reply("9.")]), ("It is 9.", [_user_message("Check it.")]), (_CALL, [tool_reply("3!")])],
    )
]


log = structlog.get_logger()

_CHECKED_PROMPTS: Final = 32
"""A group's completions mostly share one prompt; a worker has no more different prompts in flight."""


class ConversationCheck:
    """Compares real conversations, rendered as a whole, with the same rendered turn by turn. Threads may share it.

    Args:
        renderer: the model's template with an environment's tools.
        history: what the sample conversations showed.
        roles: of the replies in these.
    """

    def __init__(self, renderer: ConversationRenderer, history: HistoryCheck, roles: Sequence[str]) -> None:
        self._renderer = renderer
        self._history = history
        self._roles = frozenset(roles)
        self._continues_after = lru_cache(maxsize=_CHECKED_PROMPTS)(self._continues_after_key)

    def is_due(self, turns: Sequence[AssistantTurn]) -> bool:
        """Return whether the conversation is to be rendered as a whole after these turns."""
        count = len(turns)
        return (count > 2 and count & (count - 1) == 0) or not self._is_sampled_kind(turns[-1].replies)

    def continues(self, messages: Sequence[Message], turns: Sequence[AssistantTurn]) -> bool:
        """Return whether the template left the conversation before the last replies unchanged, as far as was compared.

        Args:
            messages: the prompt.
            turns: everything after it.
        """
        if len(turns) == 1 and not self._continues_after_prompt(messages, turns[0].replies):
            return False
        return not self.is_due(turns) or self._is_unchanged(messages, [turn.replies for turn in turns])

    def _is_sampled_kind(self, replies: Sequence[Message]) -> bool:
        """Return whether sample conversations had such replies: results alone, or one user message, of text alone."""
        if len(replies) == 1:
            return replies[0].get("role") in self._roles and type(replies[0].get("content")) is str
        roles = {reply.get("role") for reply in replies}
        is_known = len(roles) == 1 and roles <= self._roles and "tool" in roles
        return is_known and all(type(reply.get("content")) is str for reply in replies)

    def _continues_after_prompt(self, messages: Sequence[Message], replies: Sequence[Message]) -> bool:
        role = "tool" if any(reply.get("role") == "tool" for reply in replies) else "user"
        try:
            key = msgspec.msgpack.encode(messages)
        except (TypeError, ValueError, OverflowError):  # images and the like
            return self._is_unchanged(messages, _sample_replies(role))
        return self._continues_after(key, role)

    def _continues_after_key(self, messages: bytes, role: str) -> bool:
        return self._is_unchanged(msgspec.msgpack.decode(messages), _sample_replies(role))

    def _is_unchanged(self, messages: Sequence[Message], replies: Sequence[Sequence[Message]]) -> bool:
        opening, reasoning = self._history.turn_start
        turns = [AssistantTurn((), f"{reasoning}Step.", each, opening) for each in replies]
        try:
            found = find_difference(self._renderer, messages, turns)
        except PenstockError:  # the template refuses it, and says so when the conversation is rendered
            return False
        if found is None or (found.in_space and self._history.ignores_space):
            return True
        log.info("template.conversation_rewritten", turns=len(turns), why=found.text)
        return False


def _sample_replies(role: str) -> list[list[Message]]:
    """Return the replies to two sample turns."""
    return [[tool_reply(text) if role == "tool" else {"role": role, "content": text}] for text in ("3.", "4.")]
