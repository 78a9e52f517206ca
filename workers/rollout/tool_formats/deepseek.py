"""The format of DeepSeek: special tokens around each call, spelled with a full-width bar and a lower block."""

import re
from typing import ClassVar

from workers.rollout.tool_formats.parsed_turn import ParsedTurn, ToolCall
from workers.rollout.tool_formats.parsing import DECODER, parse_marked_calls, skip_whitespace, to_tool_call


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
