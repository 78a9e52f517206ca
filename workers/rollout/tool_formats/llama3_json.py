"""The format of Llama 3: the turn is JSON, or ends with it."""

import json
import re
from typing import ClassVar

from workers.rollout.tool_formats.parsed_turn import ParsedTurn, ToolCall
from workers.rollout.tool_formats.parsing import DECODER, parse_error, skip_whitespace, to_tool_call
from workers.rollout.tool_formats.reasoning import reasoning_end

_TAG = "<|python_tag|>"
_BEGINNING = re.compile(
    r"""(?:<\|python_tag\|>|^[ \t]*(?=\[?\s*\{\s*"(?:type|name|function|parameters|arguments)"\s*:))""", re.MULTILINE
)
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
        found = _BEGINNING.search(text, reasoning)
        if found is None:
            return ParsedTurn(text)
        kept, calls, errors = [text[: found.start()]], [], []
        position, tagged = found.end(), found.group() == _TAG
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
        return ParsedTurn("".join(kept).strip() if calls else text, calls, errors)

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


def _is_call(value: dict[str, object]) -> bool:
    return any(key in value for key in _KEYS)
