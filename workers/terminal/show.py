"""`penstock show`: completions of a run as conversations, one below the other, or two side by side."""

from collections.abc import Callable, Iterator, Sequence
from difflib import SequenceMatcher
from functools import partial
from itertools import zip_longest
from typing import Any, Final

import anyio
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from stream.errors import PenstockError
from stream.records import Row
from stream.wording import escape_controls, quantity
from workers.runs.export import completion_record
from workers.runs.groups import EVALUATED, CompletionView, RunGroup
from workers.runs.run import Run
from workers.runs.selection import CompletionFilter, Matches, Selection
from workers.runs.snapshots import render_completions
from workers.runs.transcript import DecodeRow, Paragraph, paragraphs
from workers.settings import Settings
from workers.terminal.lines import TranscriptLine, paragraph_lines
from workers.terminal.output import make_console, print_json, print_note

_MAX_MESSAGE_CHARACTERS: Final = 3000
"""Longer messages are shortened without `--full`."""
_MIN_WIDTH, _MAX_WIDTH = 40, 140
_MIN_SIDE, _MAX_SIDE = 30, 110
"""Columns of one of two sides."""
_CONTEXT: Final = 2
"""Equal lines that are shown around a difference."""


def show_completions(
    run: Run,
    wanted: CompletionFilter,
    chosen: Selection,
    *,
    evaluated: bool = False,
    full: bool = False,
    as_json: bool = False,
) -> None:
    """Print chosen completions of a run; `evaluated`: of its evaluations.

    Raises:
        PenstockError: no completion of it matches.
    """
    matches = run.completions(wanted, chosen, evaluated=evaluated)
    for note in matches.notes:
        print_note(note)
    if not matches and evaluated:
        which = f" that matches {wanted}" if str(wanted) else ""
        raise PenstockError(
            f"run {run.name!r} has no completion of an evaluation{which}; [eval] evaluates during a run, and "
            "archive.keep = 'none' keeps none"
        )
    if not matches:
        raise PenstockError(f"run {run.name!r} has {matches.why_empty()}")
    settings, _ = run.files("showing completions")
    rendered, notes = anyio.run(render_completions, settings, matches.items)
    for note in notes:
        print_note(note)
    if as_json:
        for view, state in zip(matches, rendered, strict=True):
            print_json(_as_json(view) | {"rendered": state.text or None, "render_error": state.error or None})
        return
    decode = _tokenizer(settings)
    described = [
        paragraphs(
            view.completion,
            decode=decode,
            state=state.error or state.text.rstrip("\n"),
            outcome=view.outcome,
            trained=view.trained,
        )
        for view, state in zip(matches, rendered, strict=True)
    ]
    render(matches, described, run.name, full=full)


def render(
    matches: Matches[CompletionView], described: Sequence[Sequence[Paragraph]], run: str, *, full: bool = False
) -> None:
    """Print completions with their paragraphs, and how many there are."""
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    width = min(_MAX_WIDTH, max(_MIN_WIDTH, console.width))
    for view, shown in zip(matches, described, strict=True):
        console.print(heading(view, width))
        for line in paragraph_lines(shown, width, 0 if full else _MAX_MESSAGE_CHARACTERS):
            console.print(line.rich_text())
        console.print()
    count = quantity(len(matches), "completion")
    count += f" of {matches.offered:,} that match" if matches.offered else ""
    if matches[0].outcome == EVALUATED:
        console.print(f"{count}; step: the one whose weights were evaluated", style="bright_black")
        return
    archived = matches.archived
    of = f"steps {archived.steps[0]} to {archived.steps[1]}" if archived.steps else "no step yet"
    missing = f", {archived.missing:,} more are not archived any more (archive.keep)" if archived.missing else ""
    text = f"{count}; the archive of {run} has {len(archived):,} groups, {of}{missing}"
    console.print(text, style="bright_black")


def heading(view: CompletionView, width: int) -> Text:
    """Return the line above a completion."""
    trained = view.trained
    advantage = "" if trained is None or trained.advantage is None else f" · advantage {trained.advantage:+.3g}"
    masks = trained is not None and not trained.loss_tokens and trained.state != view.outcome
    masked = f" · no loss: {trained.state}" if trained is not None and masks else ""
    parts = [
        f"{escape_controls(view.group.prompt.id)} #{view.completion.index}",
        *([f"step {view.step}"] if view.step is not None else []),
        f"{view.outcome}{advantage}{masked}",
        *([view.group.prompt.environment] if view.group.prompt.environment else []),
        *(["greedy"] if view.completion.greedy else []),
    ]
    head = Text(f"── {'  '.join(parts)} ", "bold")
    return head.append("─" * max(0, width - head.cell_len))


def show_difference(
    run: Run, wanted: CompletionFilter, pair: tuple[int, int], *, full: bool = False, as_json: bool = False
) -> None:
    """Print two completions of the newest group that matches, side by side, from where they differ.

    Args:
        run: the run.
        wanted: which group.
        pair: indices of the completions.
        full: show equal lines and long messages, too.
        as_json: print one JSON object.

    Raises:
        PenstockError: no group matches, or it has no such completion.
    """
    groups = run.groups(wanted, count=1)
    for note in groups.notes:
        print_note(note)
    if not groups:
        raise PenstockError(f"run {run.name!r} has {groups.why_empty()}")
    left, right = (groups.archived.with_trained_tokens(_completion(groups[0], index)) for index in pair)
    if as_json:
        print_json(
            {
                "prompt_id": left.group.prompt.id,
                "first_different_message": _first_difference(left, right),
                "completions": [_as_json(left), _as_json(right)],
            }
        )
        return
    console = make_console()
    width = min(_MAX_SIDE, max(_MIN_SIDE, (console.width - 3) // 2))
    console.print(render_difference(left, right, width, full=full))


def render_difference(left: CompletionView, right: CompletionView, width: int, *, full: bool) -> RenderableType:
    """Return two completions as two columns of this width; what only one of them has is bold."""
    sides = [
        paragraph_lines(paragraphs(view.completion), width, 0 if full else _MAX_MESSAGE_CHARACTERS)
        for view in (left, right)
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


def _completion(group: RunGroup, index: int) -> CompletionView:
    for view in group.completions:
        if view.completion.index == index:
            return view
    known = ", ".join(str(view.completion.index) for view in group.completions)
    raise PenstockError(f"group {group.completions[0].group.prompt.id} has no completion {index}; it has {known}")


def _first_difference(left: CompletionView, right: CompletionView) -> int | None:
    """Return the index of the first message that differs; None if all are equal."""
    pairs: Any = zip_longest(left.completion.messages, right.completion.messages)
    return next((position for position, (a, b) in enumerate(pairs) if a != b), None)


def _as_json(view: CompletionView) -> dict[str, Any]:
    return completion_record(view) | {"seconds": view.completion.seconds}


def _tokenizer(settings: Settings) -> DecodeRow:
    """Return a function that decodes rows with the run's tokenizer, which is loaded when it is first needed."""
    loaded: list[Callable[[list[int]], str]] = []

    def decode(row: Row) -> tuple[str, str]:
        if not loaded:
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(str(settings.model.folder / "tokenizer.json"))
            loaded.append(partial(tokenizer.decode, skip_special_tokens=False))
        return loaded[0](row.prompt.tolist()), loaded[0](row.tokens.tolist())

    return decode
