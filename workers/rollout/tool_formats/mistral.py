"""The format of Mistral: a token that announces calls, then a JSON array, or a name and its arguments."""

import json
import re
from typing import ClassVar

from workers.rollout.tool_formats.parsed_turn import ParsedTurn, ToolCall
from workers.rollout.tool_formats.parsing import (
    DECODER,
    json_type_name,
    make_tool_call,
    parse_marked_calls,
    skip_whitespace,
    to_tool_call,
)

_OPENING = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([^\s\[\]{}\"]{1,200})\s*+(?:\[CALL_ID\]\s*+(\w*+)\s*+)?(?:\[ARGS\]\s*+)?(?=\{)")
"""`name[CALL_ID]id[ARGS]{`; only the name and the brace are required. White space is never given back, so that the time
grows no faster than the text."""


class Mistral:
    """Parses `[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]`, and newer models' `[TOOL_CALLS]add[ARGS]{"a": 1}`.

    A turn may hold any number of either. A call may have an id of nine letters or digits, which its answer repeats.
    """

    openings: ClassVar[tuple[str, ...]] = (_OPENING,)

    def parse(self, text: str, *, starts_in_reasoning: bool = False) -> ParsedTurn:
        """See `ToolFormat.parse`."""
        return parse_marked_calls(text, _OPENING, self._parse_calls, starts_in_reasoning=starts_in_reasoning)

    def _parse_calls(self, text: str, start: int) -> tuple[int, list[ToolCall | str]]:
        """Return where parsing continues, and each call at `start` or its problem."""
        body = skip_whitespace(text, start)
        named = _NAMED.match(text, body)
        try:
            value, end = DECODER.raw_decode(text, named.end() if named else body)
        except (ValueError, RecursionError) as error:
            following = text.find(_OPENING, start)
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
