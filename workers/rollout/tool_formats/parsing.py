"""Parsing that the formats share: JSON that raises only ValueError, and error messages for the model.

What parsing a turn yields: its text, its tool calls, and errors for malformed calls.

Locate a turn's reasoning. Tool calls inside it are not executed, in any format.
"""

import json
import re
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, Protocol

import msgspec
from msgspec import Struct


class ToolCall(Struct):
    """One well-formed call.

    Attributes:
        name: as the model wrote it; there may be no such tool.
        arguments: by name.
        raw: the call's text, without its tags.
        id: the model's own id of nine letters and digits; None if it gave none, until it is given one.
    """

    name: str
    arguments: dict[str, Any]
    raw: str
    id: str | None = None


class ParsedTurn(Struct):
    """One turn of the model.

    Attributes:
        content: the text without its well-formed calls; the whole text if there are none.
        calls: in order.
        errors: one message per malformed call, for the model to read.
    """

    content: str
    calls: list[ToolCall] = []
    errors: list[str] = []


class ToolFormat(Protocol):
    """A syntax of tool calls.

    Attributes:
        openings: texts with which calls may begin; what comes before the first one is content.
    """

    openings: ClassVar[tuple[str, ...]]

    def parse(self, text: str, *, starts_in_reasoning: bool = False) -> ParsedTurn:
        """Parse a turn. Never raises.

        Args:
            text: the sampled text, including special tokens except for the one that ended the turn.
            starts_in_reasoning: the prompt ended inside a reasoning block, so the text starts with reasoning.
        """


_encoder = msgspec.json.Encoder()
_SPACE = re.compile(r"\s*")
_ID = re.compile(r"[A-Za-z0-9]{9}")
_MAX_ERROR = 300
MAX_ERRORS = 64
"""Malformed calls of one turn that are read; the time for each may be that for the whole text."""


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not valid JSON")


DECODER = json.JSONDecoder(parse_constant=_refuse)
"""Raises ValueError, or RecursionError. `raw_decode` finds the end: a string may contain a closing tag."""


def parse_marked_calls(
    text: str,
    marker: str,
    read_calls: Callable[[str, int], tuple[int, list[ToolCall | str]]],
    *,
    starts_in_reasoning: bool,
    wrapper: tuple[str, ...] = (),
) -> ParsedTurn:
    """Parse a turn in whose answer each tool call, or list of calls, follows a marker.

    Calls that cannot be read stay in the content, and each gets an error message for the model. After `MAX_ERRORS` of
    them the rest of the turn is content, so that the time grows no faster than the text.

    Args:
        text: the turn.
        marker: text before a call.
        read_calls: called with the text and the position after a marker; returns where parsing continues, and each call
            or what is wrong with it.
        starts_in_reasoning: the prompt opened the reasoning.
        wrapper: texts around all calls, which are not content.
    """
    if marker not in text:
        return ParsedTurn(text)
    answer = position = reasoning_end(text, starts_in_reasoning=starts_in_reasoning)
    kept: list[str] = []
    calls: list[ToolCall] = []
    errors: list[str] = []
    while len(errors) <= MAX_ERRORS and (start := text.find(marker, position)) >= 0:
        kept.append(text[position:start])
        position, found = read_calls(text, start + len(marker))
        calls += [call for call in found if isinstance(call, ToolCall)]
        problems = [parse_error(problem) for problem in found if isinstance(problem, str)]
        errors += problems
        if problems:
            kept.append(text[start:position])
    content = "".join([*kept, text[position:]])
    for words in wrapper:
        content = content.replace(words, "")
    return ParsedTurn((text[:answer] + content).strip() if calls else text, calls, limit_errors(errors))


def limit_errors(errors: list[str]) -> list[str]:
    """Return at most `MAX_ERRORS` messages, and one that says that there are more."""
    if len(errors) <= MAX_ERRORS:
        return errors
    return [*errors[:MAX_ERRORS], parse_error(f"more than {MAX_ERRORS} calls are malformed; the others were ignored")]


def to_tool_call(value: Any, raw: str, argument_names: tuple[str, ...] = ("arguments",)) -> ToolCall | str:
    """Convert decoded JSON to a call, or to a message that says what is wrong with it.

    Args:
        value: the decoded JSON.
        raw: its text.
        argument_names: keys that may hold the arguments; the first one present counts.
    """
    if not isinstance(value, dict):
        return f"it must be a JSON object, not {json_type_name(value)}"
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return "it has no 'name'"
    key = next((key for key in argument_names if key in value), argument_names[0])
    arguments = value.get(key, {})
    if isinstance(arguments, str):
        try:
            arguments = DECODER.decode(arguments)
        except (ValueError, RecursionError) as error:
            return f"its {key!r} are a string that is not JSON ({error})"
    if not isinstance(arguments, dict):
        return f"its {key!r} must be a JSON object, not {json_type_name(arguments)}"
    return make_tool_call(name, arguments, raw, value.get("id"))


def make_tool_call(name: str, arguments: dict[str, Any], raw: str, call_id: object = None) -> ToolCall | str:
    """Make a call, or a message that says why it cannot be stored and shown."""
    has_id = isinstance(call_id, str) and _ID.fullmatch(call_id) is not None
    call = ToolCall(name, arguments, raw, str(call_id) if has_id else None)
    if _is_plainly_valid(name, arguments):
        return call
    try:
        json.dumps([name, arguments], ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return "it contains half of a surrogate pair, which is not a character"
    except RecursionError:
        return "it is nested too deeply"
    except ValueError as error:
        return f"it contains a number that is not finite ({error})"
    return call


def _is_plainly_valid(name: str, arguments: dict[str, Any]) -> bool:
    """Return whether a call certainly can be written as JSON, several times as fast as `json` finds out."""
    try:
        return b"null" not in _encoder.encode((name, arguments))  # which it also writes for infinity
    except (ValueError, TypeError, OverflowError, RecursionError):
        return False


def skip_whitespace(text: str, position: int) -> int:
    """Return the next position that is not white space."""
    found = _SPACE.match(text, position)
    return found.end() if found else position


def json_type_name(value: object) -> str:
    """Return JSON's name for the type of a value."""
    names = {
        str: "a string",
        list: "an array",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        dict: "an object",
    }
    return names.get(type(value), "null")


def parse_error(problem: str) -> str:
    """Return an error message for the model."""
    return f"Error: this tool call could not be read: {problem}"[:_MAX_ERROR]


REASONING_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Opening and closing tags."""


def reasoning_end(text: str, *, starts_in_reasoning: bool = False) -> int:
    """Return how many characters of reasoning a turn starts with, including the closing tag; 0 if it has none.

    An unclosed block extends to the end of the turn. Everything before a closing tag is reasoning, even if the block
    was opened in the prompt or after some words: losing a call is better than executing one that was only considered.

    Args:
        text: the turn.
        starts_in_reasoning: the prompt opened the block.
    """
    if "think>" not in text and "THINK]" not in text:  # as in most turns
        return len(text) if starts_in_reasoning else 0
    start = text.lstrip()
    opened = [closing for opening, closing in REASONING_TAGS if start.startswith(opening)]
    closings = opened or [closing for _, closing in REASONING_TAGS]
    ends = [found + len(closing) for closing in closings if (found := text.find(closing)) >= 0]
    if ends:
        return min(ends)
    return len(text) if opened or starts_in_reasoning else 0


def open_reasoning(prompt: str) -> str:
    """Return the opening tag, with the white space after it, that a prompt ends with; empty if it does not."""
    end = prompt.rstrip()
    opening = next((opening for opening, _ in REASONING_TAGS if end.endswith(opening)), "")
    return prompt[len(end) - len(opening) :] if opening else ""
