"""Print the output of operator commands: a line of text, or a JSON value."""

import sys
from typing import Any, Final

from rich.console import Console

_PIPE_WIDTH: Final = 200
"""Columns where the output is no terminal."""


def make_console() -> Console:
    """Return a console for tables on stdout, which shows text as it is; lines that go to a file or a pipe are long."""
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Console(highlight=False, markup=False, emoji=False, width=width)


def print_line(text: str) -> None:
    """Print a line and flush it, so that a reader of a pipe gets it immediately."""
    print(text, flush=True)  # noqa: T201  (this is the command's output)


def print_note(text: str) -> None:
    """Print one line to stderr: something that does not change the result, and that a reader should know."""
    print(f"note: {' '.join(text.split())}", file=sys.stderr, flush=True)  # noqa: T201


def print_json(value: Any) -> None:
    """Print a value as one line of JSON."""
    from workers.runs.export import encode_json  # only here: what reads archives is not loaded for a table

    print_line(encode_json(value).decode())
