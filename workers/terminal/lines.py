"""A completion as lines of a terminal: labels in a column, text wrapped beside them, in colors.

::

    user       17 times 3, plus 4?
    assistant  I multiply first.
               → multiply(a=17, b=3)
    tool       51  ← multiply, 2.1 ms
    assistant  Answer: 55
    reward     1
               exact_answer 1
    ended      finished; 2 turns, 1 tool call, 31 tokens sampled, 0.8 s

What a model or a tool wrote is escaped, so that it cannot change the terminal's state or hide text.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from rich.cells import cell_len, chop_cells
from rich.text import Text

from stream.records import Completion
from stream.wording import escape_controls
from workers.runs.transcript import DecodeRow, Paragraph, paragraphs, shorten

LABEL_WIDTH: Final = 11
_MIN_TEXT_WIDTH = 20
_WORDS: Final = re.compile(r"\s*\S+")
_STYLES: Final = {
    "system": ("magenta", "dim"),
    "user": ("blue", ""),
    "assistant": ("cyan", ""),
    "tool": ("bright_black", "dim"),
    "tool error": ("yellow", "yellow"),
    "invalid": ("red", "red"),
    "reward": ("green", ""),
    "branches": ("bright_black", ""),
    "branch": ("bold", "bold"),
    "ended": ("bright_black", "bright_black"),
    "state": ("magenta", ""),
    "trainer": ("bright_black", "bright_black"),
}
"""Styles of label and text, by label."""


class TranscriptLine(NamedTuple):
    """One line of a transcript."""

    label: str
    """The speaker, or what the line is about; empty for a further line of the same speaker."""
    text: str
    kind: str
    """The label of the first line that this one belongs to; chooses the color."""

    def __str__(self) -> str:
        return f"{self.label:<{LABEL_WIDTH}}{self.text}".rstrip()

    def rich_text(self) -> Text:
        """Return the line with its colors."""
        label_style, text_style = _STYLES.get(self.kind, ("", ""))
        text_style = "bold" if self.kind == "reward" and self.label else text_style
        line = Text(no_wrap=True, overflow="ignore")
        line.append(f"{self.label:<{LABEL_WIDTH}}", label_style)
        line.append(self.text, text_style)
        line.rstrip()
        return line


def completion_lines(
    completion: Completion, *, width: int = 100, max_characters: int = 0, decode: DecodeRow | None = None
) -> list[TranscriptLine]:
    """Render a completion by itself: conversation, reward and end.

    Args:
        completion: the completion.
        width: columns that a line may fill.
        max_characters: of one message; the middle of a longer one is left out. 0: no limit.
        decode: turns tokens to text, for completions without messages.
    """
    return paragraph_lines(paragraphs(completion, decode=decode), width, max_characters)


def paragraph_lines(shown: Iterable[Paragraph], width: int, max_characters: int = 0) -> list[TranscriptLine]:
    """Render paragraphs; `max_characters` of each, 0: all."""
    return [
        line
        for label, text in shown
        for line in _wrapped_lines(label, shorten(text, max_characters) if max_characters else text, width)
    ]


def compact_lines(completion: Completion, *, width: int = 100, max_lines: int = 16) -> list[TranscriptLine]:
    """Render a completion in at most `max_lines` lines: no system message, no tree, long messages shortened."""
    shown = [each for each in paragraphs(completion) if each.label not in ("system", "branches")]
    lines = paragraph_lines(shown, width, 3 * width)
    if len(lines) <= max_lines:
        return lines
    head = max_lines // 2
    tail = max_lines - head - 1
    gap = TranscriptLine("", f"… {len(lines) - head - tail} lines …", "ended")
    return [*lines[:head], gap, *lines[-tail:]]


def _wrapped_lines(label: str, text: str, width: int) -> Iterator[TranscriptLine]:
    """Yield the lines of a paragraph, escaped, each in the columns behind the label."""
    columns = max(_MIN_TEXT_WIDTH, width - LABEL_WIDTH)
    shown = label if len(label) < LABEL_WIDTH else f"{label[: LABEL_WIDTH - 2]}…"
    for line in escape_controls(text).split("\n"):
        for part in _wrap_line(line, columns):
            yield TranscriptLine(shown, part, label)
            shown = ""


def _wrap_line(line: str, columns: int) -> list[str]:
    """Return the line in parts of at most `columns` cells, broken between words; a longer word is broken anywhere."""
    parts = [""]
    for word in _WORDS.findall(line.rstrip()):
        if parts[-1] and cell_len(parts[-1] + word) > columns:
            parts.append("")
        start = parts.pop()
        parts += chop_cells(start + (word if start or not parts else word.lstrip()), columns)
    return parts or [""]
