"""Chat template of `tool-caller` and the tokens that it consists of.

The template shows each tool as a call of it, with types in the place of values; calls have the same form. So calling a
tool is copying, which a small model can do with names that it has never seen::

    <|system|><tool_call>{"name": "set_timer", "arguments": {"label": "<string>", "minutes":<integer>}}</tool_call>...
    <|user|>Tea, 4 minutes.<|im_end|>
    <|assistant|><tool_call>{"name": "set_timer", "arguments": {"label": "Tea", "minutes":4}}</tool_call><|im_end|>

(without the line breaks). Descriptions are left out: the model knows no language. What follows a value depends on the
tokens before it alone: before the last one, the colon has no space after it.
"""

from pathlib import Path
from typing import Final

from tests.base_models.small_model import END_OF_TURN, PAD, Markup

_CALL_PHRASES: Final = (
    *(f'<tool_call>{" " * number}{{"name": "' for number in range(8)),
    '", "arguments": {"',
    '", "arguments": {}}</tool_call>',
    *('": ', '": "', '":', '":"'),
    *(', "', '", "', '"], "', '], "'),
    *("}}</tool_call>", '"}}</tool_call>', '"]}}</tool_call>', "]}}</tool_call>"),
    *('["', '"]'),
)
"""Punctuation of a call; each is one token, which makes prompts a third as long."""
_TYPES: Final = ("<integer>", "<number>", "<boolean>", "<string>")

TOOL_MARKUP: Final = Markup(
    (Path(__file__).parent / "tool_caller_template.jinja").read_text(),
    control=(PAD, END_OF_TURN, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"),
    phrases=(*_CALL_PHRASES, *_TYPES),
    opening="<|assistant|>",
)
