"""Printing of the operator commands: one line, or one JSON object."""

from typing import Any

import msgspec


def print_line(text: str) -> None:
    """Print a line at once, also into a pipe."""
    print(text, flush=True)  # noqa: T201  (this is the command's output)


def print_json(value: Any) -> None:
    """Print a value as one line of JSON."""
    print_line(msgspec.json.encode(value).decode())
