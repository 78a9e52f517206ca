"""Descriptions from docstrings and from `Annotated`."""

import inspect
from typing import Any

from docstring_parser import Docstring, DocstringStyle, ParseError, parse, parse_from_object


def annotated_description(hint: Any) -> str:
    """Return the description in `Annotated`: a string, or that of a `Meta`, a `Doc` or a pydantic `Field`."""
    for note in getattr(hint, "__metadata__", ()):
        text = (
            note
            if isinstance(note, str)
            else getattr(note, "description", None) or getattr(note, "documentation", None)
        )
        if isinstance(text, str) and text:
            return text
    return ""


def parse_google_docstring(text: str) -> Docstring:
    """Parse a Google-style docstring; a docstring in another style is all description."""
    try:
        return parse(inspect.cleandoc(text), style=DocstringStyle.GOOGLE)
    except ParseError:
        doc = Docstring()
        doc.short_description = inspect.cleandoc(text)
        return doc


def join_lines(text: str | None) -> str:
    """Return a description on one line."""
    return " ".join((text or "").split())


def class_docstring(cls: Any) -> Docstring:
    """Parse a class docstring and the docstrings of its fields, without generated ones of dataclasses and tuples."""
    try:
        found = parse_from_object(cls, style=DocstringStyle.GOOGLE)
    except (ParseError, OSError, TypeError, SyntaxError, IndentationError):
        found = parse_google_docstring(vars(cls).get("__doc__") or "")
    own = vars(cls).get("__doc__") or ""
    if not own or own.startswith(f"{cls.__name__}("):
        found.short_description = None
    return found
