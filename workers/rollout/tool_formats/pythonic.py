"""The pythonic format: a list of Python calls, parsed by Python's own parser and never executed."""

import ast
import math
import re
import warnings
from typing import Any, ClassVar

from workers.rollout.tool_formats.parsing import (
    ParsedTurn,
    ToolCall,
    limit_errors,
    make_tool_call,
    parse_error,
    reasoning_end,
)

_TAGS = (("<|tool_call_start|>", "<|tool_call_end|>"), ("<|python_start|>", "<|python_end|>"))
_BEGINNING = re.compile(r"<\|tool_call_start\|>|<\|python_start\|>|^[ \t]*(?=\[\s*[A-Za-z_][\w.]*\s*\()", re.MULTILINE)
_NAMES = {"true": True, "false": False, "null": None}
_MAX_LENGTH = 50_000
_MAX_BRACKETS = 500


class Pythonic:
    """Parses `[add(a=1, b=2), look()]`, perhaps between tags, as Llama 3.2 and 4, Gemma and LFM2 write it.

    Arguments are literals, given by name: strings, numbers, True, False, None (also in JSON's spelling), and lists,
    tuples and dictionaries of those. Text may precede the list, which starts a line, and follow it.
    """

    openings: ClassVar[tuple[str, ...]] = (*(opening for opening, _ in _TAGS), "[")

    def parse(self, text: str, *, starts_in_reasoning: bool = False) -> ParsedTurn:
        """See `ToolFormat.parse`."""
        position = reasoning_end(text, starts_in_reasoning=starts_in_reasoning)
        kept, calls, errors = [text[:position]], [], []
        while (found := _BEGINNING.search(text, position)) is not None:
            kept.append(text[position : found.start()])
            end, after = _extent(text, found)
            read = _parse_calls(text[found.end() : end])
            calls += [call for call in read if isinstance(call, ToolCall)]
            wrong = [error for error in read if isinstance(error, str)]
            errors += [parse_error(error) for error in wrong]
            if wrong:
                kept.append(text[found.start() : after])
            position = after
        kept.append(text[position:])
        return ParsedTurn("".join(kept).strip() if calls else text, calls, limit_errors(errors))


def _extent(text: str, found: re.Match[str]) -> tuple[int, int]:
    """Return where the list ends, and where the text continues after its closing tag."""
    for opening, closing in _TAGS:
        if found.group() == opening:
            end = text.find(closing, found.end())
            return (end, end + len(closing)) if end >= 0 else (len(text), len(text))
    end = text.rfind("]", found.end()) + 1 or len(text)
    return end, end


def _parse_calls(source: str) -> list[ToolCall | str]:
    """Return the calls and errors of a list."""
    source = source.strip()
    if len(source) > _MAX_LENGTH or sum(map(source.count, "([{")) > _MAX_BRACKETS:
        return ["it is too long, or nested too deeply"]
    try:
        with warnings.catch_warnings():  # about invalid escapes in strings
            warnings.simplefilter("ignore")
            tree = ast.parse(source, mode="eval").body
    except SyntaxError as error:
        return [f"it is not a list of Python calls ({error.msg})"]
    except (ValueError, RecursionError, MemoryError) as error:
        return [f"it is not a list of Python calls ({error})"]
    if isinstance(tree, ast.Call):
        tree = ast.List([tree])
    if not isinstance(tree, ast.List) or not tree.elts:
        return ["it must be a list of calls, such as [name(argument=1)]"]
    return [_call(node, source) for node in tree.elts]


def _call(node: ast.expr, source: str) -> ToolCall | str:
    if not isinstance(node, ast.Call) or (name := _dotted(node.func)) is None:
        return "the list contains something that is not a call"
    if node.args:
        return f"{name}: give arguments by name"
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            return f"{name}: give each argument once, by name"
        try:
            arguments[keyword.arg] = _literal(keyword.value)
        except (ValueError, RecursionError) as error:
            return f"{name}: argument {keyword.arg}: {error}"
    return make_tool_call(name, arguments, ast.get_source_segment(source, node) or source)


def _dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := _dotted(node.value)) is not None:
        return f"{before}.{node.attr}"
    return None


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal that JSON could hold.

    Raises:
        ValueError: it is not such a literal.
    """
    match node:
        case ast.Constant(value=bool() | int() | str() | None as value):
            return value
        case ast.Constant(value=float() as value) if math.isfinite(value):
            return value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as value)) if (
            not isinstance(value, bool) and math.isfinite(value)
        ):
            return -value if isinstance(sign, ast.USub) else value
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_literal(element) for element in elements]
        case ast.Dict(keys=keys, values=values):
            names = [key.value if isinstance(key, ast.Constant) else None for key in keys]
            if not all(isinstance(name, str) for name in names):
                raise ValueError("keys must be strings")
            return {name: _literal(value) for name, value in zip(names, values, strict=True)}
        case _:
            pass
    raise ValueError("only plain values are allowed: strings, numbers, True, False, None, lists and dictionaries")
