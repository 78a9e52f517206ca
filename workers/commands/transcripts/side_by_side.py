"""`penstock show --diff`: two completions of one group side by side."""

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stream.errors import PenstockError
from workers.commands.transcripts.group_list import find_groups
from workers.commands.transcripts.run_completions import RunCompletion
from workers.commands.transcripts.selection import Filter
from workers.commands.transcripts.show import completion_as_json
from workers.runs.groups import RunGroup
from workers.terminal.lines import TranscriptLine, completion_lines
from workers.terminal.output import make_console, print_json
from workers.terminal.show import heading

_MIN_WIDTH = 30
_MAX_WIDTH = 110
"""Columns of one side."""
_CONTEXT = 2
"""Equal lines that are shown around a difference."""
_MAX_MESSAGE_CHARACTERS = 3000


def show_difference(
    target: str | None, redis: str, filter_: Filter, pair: tuple[int, int], *, full: bool = False, as_json: bool = False
) -> None:
    """Print two completions of the newest group that matches, side by side, from where they differ.

    Args:
        target: folder, settings file or name of the run.
        redis: URL of its server, if its folder does not name it.
        filter_: which group.
        pair: indices of the completions.
        full: show equal lines and long messages, too.
        as_json: print one JSON object.

    Raises:
        PenstockError: no group matches, or it has no such completion.
    """
    found = find_groups(target, redis, filter_, 1)
    (group,) = found.groups
    left, right = (found.archived.annotate(_completion(group, index)) for index in pair)
    if as_json:
        print_json(
            {
                "prompt_id": left.group.prompt.id,
                "first_different_message": _first_difference(left, right),
                "completions": [completion_as_json(left), completion_as_json(right)],
            }
        )
        return
    console = make_console()
    width = min(_MAX_WIDTH, max(_MIN_WIDTH, (console.width - 3) // 2))
    console.print(render_difference(left, right, width, full=full))


def render_difference(left: RunCompletion, right: RunCompletion, width: int, *, full: bool) -> RenderableType:
    """Return two completions as two columns of this width; what only one of them has is bold."""
    sides = [
        completion_lines(each.completion, width=width, max_characters=0 if full else _MAX_MESSAGE_CHARACTERS)
        for each in (left, right)
    ]
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(width=width, no_wrap=True)
    table.add_column(width=width, no_wrap=True)
    table.add_row(heading(left, width), heading(right, width))
    for a, b in _aligned(*sides, with_equal=full):
        table.add_row(a, b)
    return Group(table)


def _aligned(
    left: Sequence[TranscriptLine], right: Sequence[TranscriptLine], *, with_equal: bool
) -> Iterator[tuple[Text, Text]]:
    """Yield the lines of both sides in pairs: equal ones dim, most of them left out; others bold."""
    matcher = SequenceMatcher(None, [str(line) for line in left], [str(line) for line in right], autojunk=False)
    for kind, start, end, other_start, other_end in matcher.get_opcodes():
        if kind == "equal":
            yield from _equal_lines(left[start:end], right[other_start:other_end], with_equal=with_equal)
            continue
        for a, b in zip_longest(left[start:end], right[other_start:other_end]):
            yield _bold(a), _bold(b)


def _equal_lines(
    left: Sequence[TranscriptLine], right: Sequence[TranscriptLine], *, with_equal: bool
) -> Iterator[tuple[Text, Text]]:
    hidden = len(left) - 2 * _CONTEXT
    for position, (a, b) in enumerate(zip(left, right, strict=True)):
        if with_equal or hidden <= 1 or position < _CONTEXT or position >= len(left) - _CONTEXT:
            yield _dim(a), _dim(b)
        elif position == _CONTEXT:
            note = Text(f"… {hidden} equal lines …", "bright_black")
            yield note, note


def _bold(line: TranscriptLine | None) -> Text:
    text = Text() if line is None else line.rich_text()
    text.stylize("bold")
    return text


def _dim(line: TranscriptLine) -> Text:
    return Text(str(line), "bright_black", no_wrap=True)


def _completion(group: RunGroup, index: int) -> RunCompletion:
    for found in group.completions:
        if found.completion.index == index:
            return found
    known = ", ".join(str(found.completion.index) for found in group.completions)
    raise PenstockError(f"group {group.completions[0].group.prompt.id} has no completion {index}; it has {known}")


def _first_difference(left: RunCompletion, right: RunCompletion) -> int | None:
    """Return the index of the first message that differs; None if all are equal."""
    pairs: Any = zip_longest(left.completion.messages, right.completion.messages)
    return next((position for position, (a, b) in enumerate(pairs) if a != b), None)
