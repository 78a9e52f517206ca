"""What docstrings and `Annotated` say in words."""

import inspect
from typing import Any

from docstring_parser import Docstring, DocstringStyle, ParseError, parse, parse_from_object


def annotated_description(hint: Any) -> str:
    """What `Annotated` says in words: a string, or the description of a `Meta`, a `Doc` or a pydantic `Field`."""
    for note in getattr(hint, "__metadata__", ()):
        told = (
            note
            if isinstance(note, str)
            else getattr(note, "description", None) or getattr(note, "documentation", None)
        )
        if isinstance(told, str) and told:
            return told
    return ""


def parse_google_docstring(text: str) -> Docstring:
    """A docstring in Google's style; one of another style is all description."""
    try:
        return parse(inspect.cleandoc(text), style=DocstringStyle.GOOGLE)
    except ParseError:
        doc = Docstring()
        doc.short_description = inspect.cleandoc(text)
        return doc


def join_lines(text: str | None) -> str:
    """A description without the line breaks of its docstring."""
    return " ".join((text or "").split())


def class_docstring(cls: Any) -> Docstring:
    """Its own docstring, and those of its fields; not the one that dataclasses and named tuples are given."""
    try:
        found = parse_from_object(cls, style=DocstringStyle.GOOGLE)
    except (ParseError, OSError, TypeError, SyntaxError, IndentationError):
        found = parse_google_docstring(vars(cls).get("__doc__") or "")
    own = vars(cls).get("__doc__") or ""
    if not own or own.startswith(f"{cls.__name__}("):
        found.short_description = None
    return found
