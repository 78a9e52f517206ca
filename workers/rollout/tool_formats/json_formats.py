"""The format of Hermes and Qwen: JSON between tags.

The format of Llama 3: the turn is JSON, or ends with it.

The format of Mistral: a token that announces calls, then a JSON array, or a name and its arguments.

The format of DeepSeek: special tokens around each call, spelled with a full-width bar and a lower block.
"""

import json
import re
from collections.abc import Callable
from typing import ClassVar

from workers.rollout.tool_formats.parsing import (
    DECODER,
    ParsedTurn,
    ToolCall,
    json_type_name,
    limit_errors,
    make_tool_call,
    parse_error,
    parse_marked_calls,
    reasoning_end,
    skip_whitespace,
    to_tool_call,
)

_OPENING = "<tool_call>"
_CLOSING = "</tool_call>"


class Hermes:
    """Parses `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`, any number in a turn.

    Arguments may also be a string that holds a JSON object, or be missing.
    """

    openings: ClassVar[tuple[str, ...]] = (_OPENING,)

    def parse(self, text: str, *, starts_in_reasoning: bool = False) -> ParsedTurn:
        """See `ToolFormat.parse`."""
        return parse_marked_calls(text, _OPENING, self._parse_call, starts_in_reasoning=starts_in_reasoning)

    def _parse_call(self, text: str, start: int) -> tuple[int, list[ToolCall | str]]:
        """Return where parsing continues, and the call whose JSON starts at `start`, or its problem."""
        body = skip_whitespace(text, start)
        try:
            value, end = DECODER.raw_decode(text, body)
        except (ValueError, RecursionError) as error:
            return self._skip(text, start, f"its JSON is malformed ({error})")
        closing = skip_whitespace(text, end)
        if not text.startswith(_CLOSING, closing):
            what = (
                f"its JSON is followed by {text[closing : closing + 20]!r}" if closing < len(text) else "the turn ends"
            )
            return self._skip(text, start, f"{_CLOSING} is missing: {what}")
        return closing + len(_CLOSING), [to_tool_call(value, text[body:end])]

    def _skip(self, text: str, start: int, problem: str) -> tuple[int, list[ToolCall | str]]:
        """Continue after this call's closing tag, but before the next call's opening tag."""
        closing, opening = text.find(_CLOSING, start), text.find(_OPENING, start)
        if closing >= 0 and (opening < 0 or closing < opening):
            return closing + len(_CLOSING), [problem]
        if closing < 0 and _CLOSING not in problem:
            problem = f"{_CLOSING} is missing; {problem}"
        return (opening if opening >= 0 else len(text)), [problem]


_TAG = "<|python_tag|>"
_OBJECT = re.compile(r'\{\s*+"(?:type|name|function|parameters|arguments)"\s*+:')
"""How a call begins that has no tag."""
_KEYS = ("parameters", "arguments")


class Llama3Json:
    r"""Parses bare JSON: `{"name": "add", "parameters": {"a": 1}}`, perhaps after `<|python_tag|>`.

    Several calls follow one another, with `;`, a line break or nothing between them, or in one array. Text may precede
    the first, which starts a line. JSON that names neither a function nor parameters is an answer and not a call,
    unless it follows the tag.
    """

    openings: ClassVar[tuple[str, ...]] = (_TAG, "{", "[")

    def parse(self, text: str, *, starts_in_reasoning: bool = False) -> ParsedTurn:
        """See `ToolFormat.parse`."""
        reasoning = reasoning_end(text, starts_in_reasoning=starts_in_reasoning)
        beginning, tagged = _find_beginning(text, reasoning)
        if beginning < 0:
            return ParsedTurn(text)
        kept, calls, errors = [text[:beginning]], [], []
        position = beginning + len(_TAG) * tagged
        while position < len(text):
            start = position
            position, read = self._parse_calls(text, position, tagged=tagged)
            if not read:
                kept.append(text[start:])
                break
            calls += [call for call in read if isinstance(call, ToolCall)]
            errors += [error for error in read if isinstance(error, str)]
            if isinstance(read[-1], str):
                kept.append(text[start:position])
            following = skip_whitespace(text, position)
            while text.startswith((";", ","), following):
                following = skip_whitespace(text, following + 1)
            if text.startswith(_TAG, following):
                tagged, following = True, skip_whitespace(text, following + len(_TAG))
            elif not text.startswith(("{", "["), following):
                kept.append(text[position:].removeprefix(";"))
                break
            position = following
        return ParsedTurn("".join(kept).strip() if calls else text, calls, limit_errors(errors))

    def _parse_calls(self, text: str, start: int, *, tagged: bool) -> tuple[int, list[ToolCall | str]]:
        """Return the end of the JSON that starts at `start`, and its calls and errors; none if it is not a call."""
        body = skip_whitespace(text, start)
        try:
            value, end = DECODER.raw_decode(text, body)
        except (ValueError, RecursionError) as error:
            return len(text), [parse_error(f"its JSON is malformed ({error})")]
        values = value if isinstance(value, list) and value else [value]
        if not tagged and not all(isinstance(each, dict) and _is_call(each) for each in values):
            return end, []
        read = [to_tool_call(each, text[body:end] if len(values) == 1 else json.dumps(each), _KEYS) for each in values]
        return end, [call if isinstance(call, ToolCall) else parse_error(call) for call in read]


def _find_beginning(text: str, start: int) -> tuple[int, bool]:
    """Return where the first tag, or line with an object or array of calls, begins, and whether it is a tag.

    The position is -1 without either. White space is looked at backwards from each object, so once.
    """
    tag = text.find(_TAG, start)
    for found in _OBJECT.finditer(text, start, tag if tag >= 0 else len(text)):
        brace = found.start()
        blank = brace - len(_last_blanks(text, start, brace, str.isspace))
        if blank > start and text[blank - 1] == "[":
            line = blank - 1 - len(_last_blanks(text, start, blank - 1, " \t".__contains__))
            if _starts_line(text, line):
                return line, False
        if _starts_line(text, blank):
            return blank, False
        if (line := text.find("\n", blank, brace) + 1) > 0:
            return line, False
    return tag, tag >= 0


def _last_blanks(text: str, start: int, end: int, is_blank: Callable[[str], bool]) -> str:
    """Return the blanks at the end of `text[start:end]`."""
    position = end
    while position > start and is_blank(text[position - 1]):
        position -= 1
    return text[position:end]


def _starts_line(text: str, position: int) -> bool:
    return position == 0 or text[position - 1] == "\n"


def _is_call(value: dict[str, object]) -> bool:
    return any(key in value for key in _KEYS)


_MISTRAL_OPENING = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([^\s\[\]{}\"]{1,200})\s*+(?:\[CALL_ID\]\s*+(\w*+)\s*+)?(?:\[ARGS\]\s*+)?(?=\{)")
"""`name[CALL_ID]id[ARGS]{`; only the name and the brace are required. White space is never given back, so that the time
grows no faster than the text."""


class Mistral:
    """Parses `[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]`, and newer models' `[TOOL_CALLS]add[ARGS]{"a": 1}`.

    A turn may hold any number of either. A call may have an id of nine letters or digits, which its answer repeats.
    """

    openings: ClassVar[tuple[str, ...]] = (_MISTRAL_OPENING,)

    def parse(self, text: str, *, starts_in_reasoning: bool = False) -> ParsedTurn:
        """See `ToolFormat.parse`."""
        return parse_marked_calls(text, _MISTRAL_OPENING, self._parse_calls, starts_in_reasoning=starts_in_reasoning)

    def _parse_calls(self, text: str, start: int) -> tuple[int, list[ToolCall | str]]:
        """Return where parsing continues, and each call at `start` or its problem."""
        body = skip_whitespace(text, start)
        named = _NAMED.match(text, body)
        try:
            value, end = DECODER.raw_decode(text, named.end() if named else body)
        except (ValueError, RecursionError) as error:
            following = text.find(_MISTRAL_OPENING, start)
            end = following if following >= 0 else len(text)
            what = "its JSON is malformed" if named or text.startswith(("[", "{"), body) else "no name or JSON follows"
            return end, [f"{what} ({error})"]
        if named:
            name, identity = named.groups()
            if isinstance(value, dict):
                return end, [make_tool_call(name, value, text[body:end], identity)]
            return end, [f"not an object, {json_type_name(value)}"]
        if not isinstance(value, list):
            return end, [to_tool_call(value, text[body:end])]
        return end, [to_tool_call(each, json.dumps(each)) for each in value] or ["the array is empty"]


def _token(words: str) -> str:
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_ALL_BEGIN, _ALL_END = _token("tool calls begin"), _token("tool calls end")
_BEGIN, _SEPARATOR, _END = _token("tool call begin"), _token("tool sep"), _token("tool call end")
_NAME = re.compile(r"\s*([^\s`{]+)\s*(?:```(?:json)?)?\s*")
_FENCE = re.compile(r"\s*(?:```)?\s*")


class DeepSeek:
    """Parses `BEGIN function SEP add`, JSON in a fence, `END` (V3 and R1), and `BEGIN add SEP {"a": 1} END` (V3.1).

    The tokens around all calls of a turn are not content, and may be missing.
    """

    openings: ClassVar[tuple[str, ...]] = (_ALL_BEGIN, _BEGIN)

    def parse(self, text: str, *, starts_in_reasoning: bool = False) -> ParsedTurn:
        """See `ToolFormat.parse`."""
        return parse_marked_calls(
            text, _BEGIN, self._parse_call, starts_in_reasoning=starts_in_reasoning, wrapper=(_ALL_BEGIN, _ALL_END)
        )

    def _parse_call(self, text: str, start: int) -> tuple[int, list[ToolCall | str]]:
        """Return where parsing continues, and the call that starts at `start`, or its problem."""
        following = text.find(_BEGIN, start)
        limit = following if following >= 0 else len(text)
        separator = text.find(_SEPARATOR, start, limit)
        if separator < 0:
            return limit, [f"{_SEPARATOR} is missing"]
        name, body = text[start:separator].strip(), skip_whitespace(text, separator + len(_SEPARATOR))
        if not text.startswith("{", body):
            named = _NAME.match(text, body, limit)
            if named is None:
                return limit, ["it has no name"]
            name, body = named.group(1), named.end()
        try:
            value, end = DECODER.raw_decode(text, body)
        except (ValueError, RecursionError) as error:
            return limit, [f"its JSON is malformed ({error})"]
        fence = _FENCE.match(text, end)
        closing = fence.end() if fence else end
        if not text.startswith(_END, closing):
            return max(limit, end), [f"{_END} is missing"]
        return closing + len(_END), [to_tool_call({"name": name, "arguments": value}, text[start:closing])]
