"""Values as HTML tables for notebooks, which call the method `_repr_html_` of a value.

All text is escaped: nothing that a model, an environment or a user wrote can become markup or a script.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Final

from stream.records import Completion, Group
from stream.wording import cut, escape_controls
from workers.runs.transcript import content_text, conversation, describe_reward, invalid_reason

_MAX_CHARACTERS: Final = 240
"""Length at which a prompt or an answer is cut in a table."""
_MAX_ROWS: Final = 100
_CELL: Final = '<td style="text-align:left;vertical-align:top;white-space:pre-wrap">{}</td>'
COMPLETION_COLUMNS: Final = ("completion", "reward", "end", "turns", "tokens", "answer")


def html_table(caption: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table of at most a hundred rows, with the number of the rows that were left out below.

    Args:
        caption: text above the table.
        header: names of the columns; empty: the table has no header.
        rows: the cells of each row. None is an empty cell, and a float is shown with four digits.
    """
    lines = [f"<tr>{''.join(_CELL.format(_cell_text(cell)) for cell in row)}</tr>" for row in rows]
    if (more := len(lines) - _MAX_ROWS) > 0:
        lines[_MAX_ROWS:] = [f'<tr><td colspan="{len(header)}">and {more:,} more</td></tr>']
    names = "".join(f'<th style="text-align:left">{_cell_text(name)}</th>' for name in header)
    head = f"<thead><tr>{names}</tr></thead>" if header else ""
    title = f'<caption style="text-align:left;white-space:pre-wrap">{_cell_text(caption)}</caption>'
    return f"<table>{title}{head}<tbody>{''.join(lines)}</tbody></table>"


def html_details(title: str, text: str) -> str:
    """Return a text that is hidden until the reader clicks its title."""
    summary, body = _cell_text(title), _cell_text(text)
    return f'<details><summary>{summary}</summary><pre style="white-space:pre-wrap">{body}</pre></details>'


def html_facts(caption: str, facts: Mapping[str, object]) -> str:
    """Return a table of names and values; empty values are left out."""
    return html_table(caption, (), [pair for pair in facts.items() if pair[1] not in ("", None)])


def group_html(group: Group, outcome: str = "") -> str:
    """Return a table of a group's completions, with its prompt above."""
    prompt = group.completions[0].prompt_messages if group.completions else group.prompt.messages
    text = content_text(prompt[-1].get("content")) if prompt else ""
    about = ", ".join(filter(None, [f"group of prompt {group.prompt.id}", group.prompt.environment, outcome]))
    return html_table(
        f"{about}\n{cut(text, _MAX_CHARACTERS)}", COMPLETION_COLUMNS, map(completion_cells, group.completions)
    )


def group_line(group: Group) -> str:
    """Return a group in one line, without its tokens."""
    rewards = ", ".join(describe_reward(completion.reward) for completion in group.completions)
    return f"Group({group.prompt.id!r}, rewards: {rewards})"


def completion_cells(completion: Completion) -> tuple[object, ...]:
    """Return a cell for each of `COMPLETION_COLUMNS`; `answer` is the completion's tool calls and its last text."""
    tokens = sum(row.sampled_count for row in completion.rows)
    end = invalid_reason(completion) or str(completion.truncated or "finished")
    turns = [message for message in conversation(completion) if message.role == "assistant" and not message.is_prompt]
    calls = [call for message in turns for call in message.calls]
    answer = "\n".join([*calls, *[message.text for message in turns if message.text][-1:]])
    return (
        completion.index,
        describe_reward(completion.reward),
        end,
        completion.turns,
        tokens,
        cut(answer, _MAX_CHARACTERS),
    )


def _cell_text(cell: object) -> str:
    if isinstance(cell, list):
        cell = ", ".join(map(str, cell))
    shown = "" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell)
    return escape(escape_controls(shown))
