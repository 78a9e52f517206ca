"""Print the output of operator commands: a line of text, or a JSON value."""

from typing import Any

import msgspec


def print_line(text: str) -> None:
    """Print a line and flush it, so that a reader of a pipe gets it immediately."""
    print(text, flush=True)  # noqa: T201  (this is the command's output)


def print_json(value: Any) -> None:
    """Print a value as one line of JSON."""
    print_line(msgspec.json.encode(value).decode())
