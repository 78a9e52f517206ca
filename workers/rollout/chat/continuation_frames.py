r"""What a chat template writes around the messages between two turns, found once, so that most need no rendering.

    \n<|im_start|>user\n<tool_response>\n ... \n</tool_response><|im_end|>\n<|im_start|>assistant\n

A frame is the text of a rendering with marks in place of contents, names and ids. A template may treat some contents
differently (strip them, escape them, compare them with a word), so a frame is used only if it agrees with the template
on samples made from every text and number in the template's source, and later on real messages, of which ever fewer are
compared. Models invent names of tools; a message whose name is no plain word is rendered.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import structlog
from jinja2 import Environment

from stream.errors import PenstockError
from stream.records import Message

log = structlog.get_logger()

_MAX_MESSAGES: Final = 4
"""Largest number of messages between two turns that frames are made for."""
_MAX_LITERAL: Final = 80
"""Longer texts of a template are instructions, which no result is compared with."""
_MAX_LENGTH: Final = 100_000
"""Larger numbers of a template are no lengths of results."""
_PLAIN_KEYS: Final = frozenset(("role", "content"))
_TOOL_KEYS: Final = frozenset(("role", "content", "name", "tool_call_id"))
_WORD: Final = re.compile(r"[\w.-]{1,64}", re.ASCII)
"""Names and ids that templates write as they are, unless they look for this one."""
_MARK: Final = re.compile(r"(content|name|tool_call_id)7f3a(\d)|(?<!\w)mark(\d)7f3a(?!\w)")
_SAMPLES: Final = (
    *("", " ", "\n", "42", " 42\n", "\n\n42", "a\tb ", "true", "null", "None", "[]", "{}", '{"a": [1, "b"]}', "[1, 2]"),
    *("'", '"', "\\", "\\n", "a\nb", "<b>&amp;</b>", "{{ 7 }}", "{% if %}", "é中🙂", "Error: it failed"),
    *("a b\n" * 1000 + "c", "x" * 5000),
)

Render = Callable[[Sequence[Message]], str]


class _Piece(NamedTuple):
    """A field of a message, and the text after it."""

    message: int
    field: str
    after: str


class _Frame(NamedTuple):
    before: str
    pieces: tuple[_Piece, ...]
    convert: Callable[[str], str]
    """How the template writes a content."""

    def fill(self, messages: Sequence[Message]) -> str:
        parts = [self.before]
        for position, field, after in self.pieces:
            value = messages[position][field]
            parts += (self.convert(value) if field == "content" else value, after)
        return "".join(parts)


class ContinuationFrames:
    """The frames of one template.

    Args:
        render: the template's text for messages between two turns.
        source: of the template.
    """

    def __init__(self, render: Render, source: str) -> None:
        self._render = render
        self._frames: dict[tuple[str, ...], _Frame] = {}
        self._uses = 0
        self._samples = sample_contents(source)

    def learn(self, roles: Sequence[str]) -> None:
        """Find the frames for messages of each of these roles: one message, and several tool messages."""
        for role in roles:
            for count in range(1, _MAX_MESSAGES + 1 if role == "tool" else 2):
                key = (role,) * count
                frame = self._find(key)
                if frame is None:
                    break
                self._frames[key] = frame

    def text(self, messages: Sequence[Message]) -> str | None:
        """Return what the template writes; None if it has to be rendered."""
        frame = self._frames.get(tuple([str(message.get("role")) for message in messages]))
        if frame is None or not all(map(_is_plain, messages)):
            return None
        text = frame.fill(messages)
        self._uses += 1
        if self._uses & (self._uses - 1) == 0 and text != self._render(messages):  # the 1st, 2nd, 4th, 8th, ...
            log.warning("template.frame_dropped", roles=[message["role"] for message in messages])
            self._frames.clear()
            return None
        return text

    def _find(self, roles: tuple[str, ...]) -> _Frame | None:
        """Return the frame for messages of these roles, if it agrees with the template on every sample.

        Each sample is the content of one message, or of all, and the name of a tool if it can be one.
        """
        try:
            text = self._render(
                [_message(role, f"content7f3a{i}", f"name7f3a{i}", f"mark{i}7f3a") for i, role in enumerate(roles)]
            )
            frames = [_parse(text, convert) for convert in _CONVERSIONS]
            for number, sample in enumerate(self._samples):
                at = number % (len(roles) + 1)
                name = sample if _WORD.fullmatch(sample) else f"Tool_{number}.x-y"
                messages = [
                    _message(role, sample if at in (i, len(roles)) else f"r{i}", name, f"call{number:04}{i}")
                    for i, role in enumerate(roles)
                ]
                rendered = self._render(messages)
                frames = [frame for frame in frames if frame.fill(messages) == rendered]
                if not frames:
                    return None
        except PenstockError:  # it refuses some of them: let it refuse real ones, too
            return None
        return frames[0]


def _is_plain(message: Message) -> bool:
    if type(message.get("content")) is not str:
        return False
    if message["role"] != "tool":
        return message.keys() == _PLAIN_KEYS
    return message.keys() == _TOOL_KEYS and _is_word(message, "name") and _is_word(message, "tool_call_id")


def _is_word(message: Message, field: str) -> bool:
    value = message[field]
    return type(value) is str and _WORD.fullmatch(value) is not None


def _message(role: str, content: str, name: str, call_id: str) -> Message:
    named = {"name": name, "tool_call_id": call_id} if role == "tool" else {}
    return {"role": role, **named, "content": content}


def _parse(text: str, convert: Callable[[str], str]) -> _Frame:
    """Split a rendering at its marks."""
    found = list(_MARK.finditer(text))
    ends = [match.start() for match in found[1:]] + [len(text)]
    pieces = tuple(
        _Piece(int(match[2] or match[3]), match[1] or "tool_call_id", text[match.end() : end])
        for match, end in zip(found, ends, strict=True)
    )
    return _Frame(text[: found[0].start()] if found else text, pieces, convert)


def sample_contents(source: str) -> list[str]:
    """Return contents, among them every text of the template that it might look for, and one of every length."""
    literals = {text[1:-1] for text in _literals(source, "string")}
    texts = sorted(text for text in literals if text.strip() and len(text) <= _MAX_LITERAL)
    long = ["x" * (number + 1) for number in sorted(numbers_in(source)) if len(_SAMPLES[-1]) <= number <= _MAX_LENGTH]
    return [*_SAMPLES, *long, *texts, *(f"{text}x{text}" for text in texts), *(f"x{text}x" for text in texts)]


def numbers_in(source: str) -> set[int]:
    """Return the integers in a template, which it may compare lengths or counts with."""
    return {int(text.replace("_", ""), 0) for text in _literals(source, "integer")}


def _literals(source: str, kind: str) -> set[str]:
    tokens = Environment(extensions=["jinja2.ext.loopcontrols"]).lex(source)  # noqa: S701
    return {str(text) for _, found, text in tokens if found == kind}


def _as_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


_CONVERSIONS: Final = (str, str.strip, _as_json)
