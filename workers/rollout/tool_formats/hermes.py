"""The format of Hermes and Qwen: JSON between tags."""

from typing import ClassVar

from workers.rollout.tool_formats.parsed_turn import ParsedTurn, ToolCall
from workers.rollout.tool_formats.parsing import DECODER, parse_marked_calls, skip_whitespace, to_tool_call

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
