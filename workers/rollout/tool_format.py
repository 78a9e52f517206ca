"""How a model writes tool calls: from a turn's text to calls, or to errors that the model can read.

A format is an object with `parse`; `TOOL_FORMATS` finds it by the name in `model.tool_format`. Whatever a model writes
is its own business: parsing never raises, a malformed call becomes an error text that goes back to the model.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NoReturn, Protocol

_SPACE = re.compile(r"\s*")
_MAX_ERROR = 300


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One well-formed call.

    Attributes:
        name: as the model wrote it; no promise that there is such a tool.
        arguments: by name.
        raw: the call as it stood in the text, without its tags.
    """

    name: str
    arguments: dict[str, Any]
    raw: str


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """What an assistant's turn says and asks for.

    Attributes:
        content: the text without its well-formed calls; the whole text where there are none.
        calls: in order.
        errors: one text for each malformed call, for the model to read.
    """

    content: str
    calls: list[ToolCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class ToolFormat(Protocol):
    """A way of writing tool calls."""

    def parse(self, text: str) -> ParsedTurn:
        """Read a turn's text. Never raises."""


class Hermes:
    """JSON between tags: `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`, any number in a turn.

    Arguments may also be a string that holds a JSON object; a call without any may leave them out. What stands in a
    reasoning block (up to the first `</think>`) is thought, not called.
    """

    opening = "<tool_call>"
    closing = "</tool_call>"
    end_of_reasoning = "</think>"

    def parse(self, text: str) -> ParsedTurn:
        """See `ToolFormat.parse`."""
        if self.opening not in text:
            return ParsedTurn(text)
        reasoning = text.find(self.end_of_reasoning)
        position = 0 if reasoning < 0 else reasoning + len(self.end_of_reasoning)
        kept, calls, errors = [text[:position]], [], []
        while (start := text.find(self.opening, position)) >= 0:
            kept.append(text[position:start])
            position, call = self._read(text, start + len(self.opening))
            if isinstance(call, ToolCall):
                calls.append(call)
            else:
                errors.append(call)
                kept.append(text[start:position])
        kept.append(text[position:])
        return ParsedTurn("".join(kept).strip() if calls else text, calls, errors)

    def _read(self, text: str, start: int) -> tuple[int, ToolCall | str]:
        """The call whose JSON begins at `start`, or an error text; and where reading goes on."""
        body = _past_space(text, start)
        try:
            # The decoder finds the end: a string inside the arguments may well contain the closing tag.
            value, length = _DECODER.raw_decode(text[body:])
        except (ValueError, RecursionError) as error:
            return self._skip(text, start, f"its JSON is malformed ({error})")
        end = body + length
        closing = _past_space(text, end)
        if not text.startswith(self.closing, closing):
            what = f"after its JSON stands {text[closing : closing + 20]!r}" if closing < len(text) else "the turn ends"
            return self._skip(text, start, f"{self.closing} is missing: {what}")
        call = _as_call(value, text[body:end])
        return closing + len(self.closing), call if isinstance(call, ToolCall) else _error(call)

    def _skip(self, text: str, start: int, problem: str) -> tuple[int, str]:
        """Go on behind this call's closing tag, but not over another call's opening."""
        closing, opening = text.find(self.closing, start), text.find(self.opening, start)
        if closing >= 0 and (opening < 0 or closing < opening):
            return closing + len(self.closing), _error(problem)
        if closing < 0 and self.closing not in problem:
            problem = f"{self.closing} is missing; {problem}"
        return (opening if opening >= 0 else len(text)), _error(problem)


TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType({"hermes": Hermes()})
"""Formats by the name that `model.tool_format` gives them."""


def _as_call(value: Any, raw: str) -> ToolCall | str:
    """The decoded JSON as a call, or what is wrong with it."""
    if not isinstance(value, dict):
        return f"it must be a JSON object, not {_kind(value)}"
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return "it has no 'name'"
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = _DECODER.decode(arguments)
        except (ValueError, RecursionError) as error:
            return f"its 'arguments' are a string that is no JSON ({error})"
    if not isinstance(arguments, dict):
        return f"its 'arguments' must be a JSON object, not {_kind(arguments)}"
    try:
        json.dumps([name, arguments], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "it contains half of a surrogate pair, which is no character"
    except RecursionError:
        return "it is nested too deeply"
    return ToolCall(name, arguments, raw)


def _past_space(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    return found.end() if found else position


def _kind(value: object) -> str:
    names = {
        str: "a string",
        list: "an array",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        dict: "an object",
    }
    return names.get(type(value), "null")


def _error(problem: str) -> str:
    return f"Error: this tool call could not be read: {problem}"[:_MAX_ERROR]
