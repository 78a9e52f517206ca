"""Render conversations as text: prompts, continuations between two turns, and whole conversations with marked turns.

A continuation is rendered after a dummy conversation of two short messages, so its cost does not depend on the length
of the real conversation.

Adapt content parts to what a chat template can render for each role.

Some templates render lists of parts, some fail, and some silently write nothing for them, or the first text alone. So
each combination of role and type is tested once: parts that the template renders stay unchanged, text parts that it
does not are joined, and an image that it would leave out is an error.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from msgspec import Struct

from envs.messages import content_text
from stream.errors import DataError, PenstockError
from stream.records import Message
from workers.rollout.chat.template import ChatTemplate, text_after_common_prefix
from workers.rollout.tool_formats.parsing import reasoning_end

_MARK = "end-of-dummy-5f1c"
"""Text of the dummy's assistant; what the template writes after it follows any assistant's text."""
_DUMMY: list[Message] = [{"role": "user", "content": "u"}, {"role": "assistant", "content": _MARK}]
_CALL_ID = "call00000"
"""Nine letters and digits, as Mistral's templates require."""


class AssistantTurn(Struct, frozen=True):
    """One turn of the model, and what the environment said after it."""

    token_ids: Sequence[int]
    """As sampled, including the token that ended the turn."""
    text: str
    """Their text, without that token."""
    replies: Sequence[Message] = ()
    """Messages that follow it: the results of its tool calls, or what the environment's `respond` returned."""
    open_reasoning: str = ""
    """Start of a reasoning block that the prompt ended with: for example `<think>` and a line break."""


class Piece(NamedTuple):
    """A part of a rendered conversation: text that the template writes, and the turn that follows it."""

    text: str
    turn: AssistantTurn | None = None
    """None at the end of the conversation."""
    cut: int = 0
    """Character at which the turn's text starts here; before it is reasoning that the template leaves out, or writes
    into `text`."""


class ConversationRenderer:
    """One model's chat template with one environment's tools. Threads may share it.

    Args:
        template: of the model.
        tools: schemas in OpenAI's function form that the template sees, or None.

    Attributes:
        end_of_turn: special token that the template writes after an assistant's text; empty if there is none.
        needs_tool_calls: the template refuses a tool message unless the turn before it has `tool_calls`.
    """

    def __init__(self, template: ChatTemplate, tools: list[dict[str, Any]] | None) -> None:
        self.template = template
        self.tools = tools or None
        self.end_of_turn = ""
        self._contents = ContentAdapter(template)
        self.needs_tool_calls = not self.accepts(_sample_conversation(False)) and self.accepts(
            _sample_conversation(True)
        )
        self._before_call = self._find_before_call() if self.needs_tool_calls else ""
        self._continuation_tools: list[dict[str, Any]] | None = None

    def after_answer(self) -> str:
        """Return what follows an assistant's text at the end of a conversation; empty if no assistant may speak."""
        for tools in (None, self.tools):  # some templates require tools
            try:
                return self.template.render(_DUMMY, tools, add_generation_prompt=False).partition(_MARK)[2]
            except DataError:
                continue
        return ""  # a template without assistant messages can still render prompts

    def set_end_of_turn(self, end_of_turn: str) -> None:
        """Set the special token that ends a turn."""
        self.end_of_turn = end_of_turn
        self._continuation_tools = self._tools_for_continuations()

    def render_prompt(self, messages: Sequence[Message]) -> str:
        """Render the conversation so far and the start of an assistant's turn.

        Raises:
            DataError: the template refuses these messages, or would leave out a part of them.
        """
        return self.template.render(self._contents.adapt(messages), self.tools, add_generation_prompt=True)

    def render_continuation(self, new_messages: Sequence[Message]) -> str:
        """Render the end of a turn, the new messages, and the start of the next turn.

        Raises:
            DataError: as for `render_prompt`.
            PenstockError: the template cannot continue after an assistant's turn.
        """
        return self._after_dummy(new_messages, self._continuation_tools)

    def render_whole(self, messages: Sequence[Message], turns: Sequence[AssistantTurn]) -> str:
        """Render the whole conversation as the template writes it now, and the start of the next turn."""
        pieces = self.render_pieces(messages, turns)
        return "".join(piece.text + (piece.turn.text[piece.cut :] if piece.turn else "") for piece in pieces)

    def render_pieces(self, messages: Sequence[Message], turns: Sequence[AssistantTurn]) -> Iterator[Piece]:
        """Render the whole conversation in pieces, the last of which has no turn.

        Each turn is rendered with a mark in place of its text after the reasoning, so that it can be located whatever
        the template does with reasoning.
        """
        mark = _unused_mark([*messages, *(reply for turn in turns for reply in turn.replies)])
        marks = [f"{mark}-{number}." for number in range(len(turns))]
        cuts = [_reasoning_length(turn) for turn in turns]
        conversation = list(self._contents.adapt(messages))
        for turn, mark, cut in zip(turns, marks, cuts, strict=True):
            as_calls = self._shows_calls(turn.replies)
            text = mark if as_calls else turn.open_reasoning + turn.text[:cut] + mark
            answers = self._contents.adapt(turn.replies)
            conversation += [_assistant_message(text, answers, as_calls=as_calls), *answers]
        whole = self.template.render(conversation, self.tools, add_generation_prompt=True)
        start = 0
        for turn, mark, cut in zip(turns, marks, cuts, strict=True):
            found = whole.find(mark, start)
            if found < 0:
                continue  # the template no longer shows this turn
            before, start = whole[start:found], found + len(mark)
            if self._shows_calls(turn.replies):
                yield Piece(before.removesuffix(self._before_call), turn)
                whole = whole[:start] + whole[start:].replace(mark, "")  # where it names a call again
                start = whole.find(self.end_of_turn, start)
                if start < 0:
                    yield Piece(self.end_of_turn)
                    return
            elif cut and before.endswith(turn.text[:cut]):
                yield Piece(before[:-cut], turn)
            else:
                yield Piece(before, turn, cut)
        yield Piece(whole[start:])

    def _shows_calls(self, replies: Sequence[Message]) -> bool:
        """Return whether the turn before these messages must be rendered with tool calls."""
        return self.needs_tool_calls and any(reply.get("role") == "tool" for reply in replies)

    def accepts(self, messages: list[Message]) -> bool:
        """Return whether the template renders these messages."""
        try:
            self.template.render(messages, self.tools, add_generation_prompt=True)
        except DataError:
            return False
        return True

    def _after_dummy(self, new_messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> str:
        """Return the end of a turn and everything after it, as text."""
        if not self.end_of_turn:
            raise PenstockError(
                f"the chat template of {self.template.folder} ends an assistant's turn without a special token, so an "
                "episode cannot go on after a turn; use a template that writes one"
            )
        answers = self._contents.adapt(new_messages)
        as_calls = self._shows_calls(new_messages)
        mark = _unused_mark(new_messages)
        dummy = [_DUMMY[0], _assistant_message(mark, answers, as_calls=as_calls)]
        after = self.template.render([*dummy, *answers], tools, add_generation_prompt=True).partition(mark)[2]
        if as_calls:  # the mark is inside a call; the turn ends after it
            after = self.end_of_turn + after.replace(mark, "").partition(self.end_of_turn)[2]
        if not after.startswith(self.end_of_turn):
            raise PenstockError(
                f"the chat template of {self.template.folder} ends an assistant's last turn with "
                f"{self.end_of_turn!r}, but one before another message with {after[:40]!r}: it cannot continue there"
            )
        return after

    def _find_before_call(self) -> str:
        """Return what the template writes between the start of a turn and the name of its first call."""
        prompt = self.render_prompt(_DUMMY[:1])
        called = [_DUMMY[0], _assistant_message(_MARK, _sample_conversation(True)[2:3], as_calls=True)]
        text = self.template.render(called, self.tools, add_generation_prompt=False)
        return text_after_common_prefix(prompt, text).partition(_MARK)[0]

    def _tools_for_continuations(self) -> list[dict[str, Any]] | None:
        """Return the tools only if the template writes another continuation without them; rendering them is slow."""
        if not self.tools or not self.end_of_turn:
            return None
        result: list[Message] = [{"role": "tool", "name": "f", "tool_call_id": _CALL_ID, "content": "r"}]
        try:
            same = self._after_dummy(result, None) == self._after_dummy(result, self.tools)
        except PenstockError:
            same = False
        return None if same else self.tools


def content_texts(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the text of each message."""
    return (content_text(message.get("content")) for message in messages)


def _reasoning_length(turn: AssistantTurn) -> int:
    """Return how many characters of reasoning a turn starts with, including the white space after it."""
    end = reasoning_end(turn.text, starts_in_reasoning=bool(turn.open_reasoning))
    return len(turn.text) - len(turn.text[end:].lstrip()) if end else 0


def _unused_mark(messages: Sequence[Message]) -> str:
    """Return a mark that no message contains."""
    mark = _MARK
    while any(mark in text for text in content_texts(messages)):
        mark += "x"
    return mark


def _assistant_message(text: str, answers: Sequence[Message], *, as_calls: bool) -> Message:
    """Return an assistant's turn with this text, or with one call per result, the first one's name after `text`.

    A template may name a result by its call.
    """
    if not as_calls:
        return {"role": "assistant", "content": text}
    calls = [
        {
            "id": answer.get("tool_call_id", _CALL_ID),
            "type": "function",
            "function": {"name": ("" if number else text) + str(answer.get("name") or "f"), "arguments": {}},
        }
        for number, answer in enumerate(answer for answer in answers if answer.get("role") == "tool")
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _sample_conversation(as_calls: bool) -> list[Message]:
    """Return a conversation with two tool results."""
    answer: Message = {"role": "tool", "name": "f", "tool_call_id": _CALL_ID, "content": "r"}
    return [_DUMMY[0], *2 * [_assistant_message(_MARK, [answer], as_calls=as_calls), answer]]


_PART_MARK, _SECOND_MARK = "part-5f1c", "second-5f1c"


class ContentAdapter:
    """Adapts messages to one template. Threads may share it."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._support: dict[tuple[str, str, bool], bool] = {}

    def adapt(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages in a form that the template renders.

        Raises:
            DataError: the template would leave a part out.
        """
        return [self._adapt(message) if isinstance(message.get("content"), list) else message for message in messages]

    def _adapt(self, message: Message) -> Message:
        role, parts = str(message.get("role")), message["content"]
        found = [str(part.get("type", "text")) for part in parts]
        kinds = sorted(set(found))
        if all(self._supports(role, kind, is_repeated=found.count(kind) > 1) for kind in kinds):
            return message
        other = [kind for kind in kinds if kind != "text"]
        if other:
            raise DataError(
                f"the chat template of {self._template.folder} renders no content parts of type {other[0]!r} in "
                f"messages of the role {role!r}: the model would never see them"
            )
        text = "\n".join(str(part.get("text", "")) for part in parts)
        as_part = self._supports(role, "text", is_repeated=False)
        return {**message, "content": [{"type": "text", "text": text}] if as_part else text}

    def _supports(self, role: str, kind: str, *, is_repeated: bool) -> bool:
        key = role, kind, is_repeated and kind == "text"
        if key not in self._support:
            self._support[key] = self._test_rendering(*key)
        return self._support[key]

    def _test_rendering(self, role: str, kind: str, is_repeated: bool) -> bool:
        """Whether the template writes something for such a part; of repeated ones, for the second, too."""
        second = [{"type": kind, kind: _SECOND_MARK}] * is_repeated
        with_part, without = self._render_parts(role, [_part(kind), *second]), self._render_parts(role, [])
        if with_part is None:
            return False
        if kind != "text":
            return with_part != without
        return _PART_MARK in with_part and (_SECOND_MARK in with_part or not is_repeated)

    def _render_parts(self, role: str, parts: list[dict[str, Any]]) -> str | None:
        message: Message = {"role": role, "content": parts}
        before: list[Message] = []
        if role == "tool":
            function = {"name": "f", "arguments": {}}
            call = {"id": _CALL_ID, "type": "function", "function": function}
            message |= {"name": "f", "tool_call_id": _CALL_ID}
            before = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        elif role == "assistant":
            before = [{"role": "user", "content": "u"}]
        elif role == "system":
            return self._try_render([message, {"role": "user", "content": "u"}])
        return self._try_render([*before, message])

    def _try_render(self, messages: list[Message]) -> str | None:
        try:
            return self._template.render(messages, None, add_generation_prompt=True)
        except DataError:
            return None


def _part(kind: str) -> dict[str, Any]:
    """Return a part of that type, with the fields that templates read."""
    if kind == "image_url":
        return {"type": kind, "image_url": {"url": _PART_MARK}}
    return {"type": kind, kind: _PART_MARK}
