"""The format of Llama 3: the turn is JSON, or ends with it."""

import json
import re
from collections.abc import Callable
from typing import ClassVar

from workers.rollout.tool_formats.parsed_turn import ParsedTurn, ToolCall
from workers.rollout.tool_formats.parsing import DECODER, limit_errors, parse_error, skip_whitespace, to_tool_call
from workers.rollout.tool_formats.reasoning import reasoning_end

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
