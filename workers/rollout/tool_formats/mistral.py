"""The format of Mistral: a token that announces calls, then a JSON array, or a name and its arguments."""

import json
import re

from workers.rollout.tool_formats.parsed_turn import ParsedTurn, ToolCall
from workers.rollout.tool_formats.parsing import (
    DECODER,
    json_type_name,
    make_tool_call,
    parse_error,
    skip_whitespace,
    to_tool_call,
)
from workers.rollout.tool_formats.reasoning import reasoning_end

_OPENING = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([^\s\[\]{}\"]{1,200})\s*(?:\[CALL_ID\]\s*(\w*)\s*)?(?:\[ARGS\])?\s*(?=\{)")
"""`name[CALL_ID]id[ARGS]{`; only the name and the brace are required."""


class Mistral:
    """Parses `[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]`, and newer models' `[TOOL_CALLS]add[ARGS]{"a": 1}`.

    A turn may hold any number of either. A call may have an id of nine letters or digits, which its answer repeats.
    """

    def parse(self, text: str, *, starts_in_reasoning: bool = False) -> ParsedTurn:
        """See `ToolFormat.parse`."""
        if _OPENING not in text:
            return ParsedTurn(text)
        position = reasoning_end(text, starts_in_reasoning=starts_in_reasoning)
        kept, calls, errors = [text[:position]], [], []
        while (start := text.find(_OPENING, position)) >= 0:
            kept.append(text[position:start])
            position, read = self._parse_calls(text, start + len(_OPENING))
            calls += [call for call in read if isinstance(call, ToolCall)]
            wrong = [error for error in read if isinstance(error, str)]
            errors += wrong
            if wrong:
                kept.append(text[start:position])
        kept.append(text[position:])
        return ParsedTurn("".join(kept).strip() if calls else text, calls, errors)

    def _parse_calls(self, text: str, start: int) -> tuple[int, list[ToolCall | str]]:
        """Return where parsing continues, and the calls and errors at `start`."""
        body = skip_whitespace(text, start)
        named = _NAMED.match(text, body)
        try:
            value, end = DECODER.raw_decode(text, named.end() if named else body)
        except (ValueError, RecursionError) as error:
            following = text.find(_OPENING, start)
            end = following if following >= 0 else len(text)
            what = "its JSON is malformed" if named or text.startswith(("[", "{"), body) else "no name or JSON follows"
            return end, [parse_error(f"{what} ({error})")]
        read: list[ToolCall | str]
        if named:
            name, identity = named.groups()
            is_object = isinstance(value, dict)
            found = (
                make_tool_call(name, value, text[body:end], identity)
                if is_object
                else f"not an object, {json_type_name(value)}"
            )
            read = [found]
        elif not isinstance(value, list):
            read = [to_tool_call(value, text[body:end])]
        else:
            read = [to_tool_call(each, json.dumps(each)) for each in value] or ["the array is empty"]
        return end, [call if isinstance(call, ToolCall) else parse_error(call) for call in read]
