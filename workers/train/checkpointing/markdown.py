"""Texts of any origin in Markdown and in the metadata of a model card, where they can break nothing.

What a text says is kept, and what it would do is not: it adds no line, no cell of a table, no link and no HTML.
"""

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

_IDENTIFIER: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}\Z", re.ASCII)
"""A license, a language, or a part of a name on the hub."""
_MARKDOWN: Final = re.compile(r"([\\`*_{}\[\]()<>#|~&!$@])")
"""Characters that Markdown, or the hub's form of it, gives a meaning."""


def render_card(metadata: "ModelCardData", text: str) -> str:
    """Return a card: the metadata as YAML between two lines of dashes, and the text."""
    content = f"---\n{metadata.to_yaml()}\n---\n\n{text}"
    return content.encode("utf-8", "replace").decode()


def identifier(value: Any) -> str:
    """Return a name of letters, digits, `.`, `_` and `-`; empty if the value is anything else."""
    return value if isinstance(value, str) and _IDENTIFIER.match(value) else ""


def one_line(text: str) -> str:
    """Return a text on one line, without control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def escape_markdown(text: str) -> str:
    """Return a text that Markdown shows as it is, on one line."""
    return _MARKDOWN.sub(r"\\\1", one_line(text))


def fenced(text: str, language: str) -> str:
    """Return a block of code, with a fence that the text does not contain."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def table(heads: Sequence[str], rows: "Iterator[tuple[str, ...]] | Sequence[tuple[str, ...]]") -> str:
    """Return a Markdown table; every cell is escaped."""
    lines = [heads, ["---"] * len(heads)]
    body = [list(map(escape_markdown, row)) for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [*lines, *body])


def figure(value: float | None) -> str:
    """Return a number with three decimals; a dash for None."""
    return "-" if value is None else f"{value:.3f}"
