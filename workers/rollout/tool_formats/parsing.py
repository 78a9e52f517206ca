"""Parsing that the formats share: JSON that raises only ValueError, and error messages for the model."""

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from workers.rollout.tool_formats.parsed_turn import ParsedTurn, ToolCall
from workers.rollout.tool_formats.reasoning import reasoning_end

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
