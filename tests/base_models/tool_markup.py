r"""Chat template of `tool-caller` and the tokens that it consists of.

The template shows each tool as calls of it, and lists words and numbers of each message, all in the form in which the
model writes them. So calling a tool is choosing and copying, which a small model can do with names and values that it
has never seen. Runs of blanks and tabs, which JSON permits, are codes, here written as `⟨...⟩`::

    <|system|><|assistant|><tool_call>{"name": "set_timer", "arguments": {⟨p1⟩"tone":⟨p1⟩⟨c1⟩"low", <|or|>
    ⟨p1⟩"tone":⟨p1⟩⟨c2⟩"high", ⟨p2⟩"minutes":⟨p2⟩⟨integer⟩<|or|><|im_end|>
    <|user|>Tea, 4 minutes.⟨word⟩⟨w1⟩"Tea<|or|>⟨number⟩⟨n2⟩4<|or|>⟨word⟩⟨w3⟩"minutes<|or|><|im_end|>
    <|assistant|><tool_call>{"name": "set_timer", "arguments": {⟨p1⟩"tone":⟨p1⟩⟨c2⟩"high", ⟨p2⟩"minutes":⟨p2⟩⟨integer⟩
    ⟨number⟩⟨n2⟩4}}</tool_call><|im_end|>

(without the line breaks). Wherever the model has a choice, it is between codes: the token before them is the same one
for all of them and stands before each in the prompt, and what follows a code stands after the same code there.
Descriptions are left out: the model knows no language.
"""

import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Final

from tests.base_models.small_model import END_OF_TURN, PAD, Markup

TYPES: Final = ("integer", "number", "boolean", "string")
_STRIPPED: Final = ".,:;!?\"'`(){}"
_INTEGER: Final = re.compile("0|-?[1-9][0-9]*")
_CODES: Final = 32
"""Codes of words, and of numbers; further ones begin anew."""


def offered(text: str) -> tuple[dict[int, str], dict[int, str]]:
    """Return the words and the numbers that the template lists after a message, by their codes."""
    split = text[:600].split()
    kept = [word.strip(_STRIPPED) for word in split[:: (len(split) + 15) // 16 or 1]]
    coded = {(len(text) + i) % _CODES: word for i, word in enumerate(kept) if 0 < len(word) <= 32}
    numbers = {code: word for code, word in coded.items() if len(word) < 10 and _INTEGER.fullmatch(word)}
    words = {code: word for code, word in coded.items() if code not in numbers}
    return words or numbers, numbers


def _codes(start: str, width: int) -> Iterator[str]:
    return (start + "".join(bits) for bits in product(" \t", repeat=width))


def _phrases() -> Iterator[str]:
    """Yield the punctuation of a call; each is one token."""
    yield from (f'<tool_call>{" " * number}{{"name": "' for number in range(16))
    yield from ('", "arguments": {', '", "arguments": {}}</tool_call>')
    for code in _codes("", 5):
        yield from (f'\t\t{code}"', f'":{code}', f'":{code}[')  # before and after the name of a parameter
    for code in _codes("\t  ", 6):
        yield from (code, f'{code}"')  # before a choice
    yield from (f'{code}"' for code in _codes("\t \t ", 5))  # before a word of a message
    yield from _codes("\t \t\t", 5)  # before a number of a message
    yield from _codes("\t\t ", 4)  # types
    yield from ("\t\t\t    ", "\t\t\t   \t")  # something copied from a message: a word, a number
    for quote, bracket in product(('"', ""), ("]", "")):
        yield from (quote + bracket + end for end in (", ", "}}</tool_call>"))
    yield from ("true", "false")


TOOL_MARKUP: Final = Markup(
    (Path(__file__).parent / "tool_caller_template.jinja").read_text(),
    control=(PAD, END_OF_TURN, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|or|>"),
    phrases=tuple(_phrases()),
    opening="<|im_end|><|assistant|>",
)
