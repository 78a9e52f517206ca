"""Extract classes and functions from third-party scripts and pages: their source, unchanged.

In these files they stand beside another trainer's code, often inside the function that runs it. The extracted source
becomes a user's file, with the imports that it needs and the values of the enclosing scope that it reads.
"""

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path


def source_of(file: Path, name: str, nth: int = 0) -> str:
    """Return the source of a class or function.

    Args:
        file: a script, or a Markdown page that contains Python.
        name: the name; with dots, also the names that enclose it.
        nth: index among several of that name, from 0.
    """
    text = file.read_text()
    pieces = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE) if file.suffix == ".md" else [text]
    results = [
        textwrap.dedent("\n".join(piece.splitlines()[node.lineno - 1 : node.end_lineno]))
        for piece in pieces
        if name.rpartition(".")[2] in piece
        for path, node in _defined(ast.parse(piece), ())
        if ".".join(path).endswith(name) and path[-1] == name.rpartition(".")[2]
    ]
    assert len(results) > nth, f"{file} has {len(results)} of {name}; is it the version that is asked for?"
    return results[nth]


def _defined(node: ast.AST, within: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ast.ClassDef]]:
    for child in ast.iter_child_nodes(node):
        name = getattr(child, "name", None)
        path = (*within, name) if isinstance(child, ast.ClassDef | ast.FunctionDef) else within
        if path is not within:
            yield path, child
        yield from _defined(child, path)


def written(file: Path, *sources: str, imports: str = "", paths: tuple[Path, ...] = (), **scope: str) -> Path:
    """Write a user's file with these sources.

    Args:
        file: to write.
        sources: of classes and functions.
        imports: statements that they need.
        paths: folders to import from.
        scope: expressions for the names that they read.
    """
    result = [f"import sys\nsys.path += {[str(path) for path in paths]}"] if paths else []
    values = [f"{name} = {value}" for name, value in scope.items()]
    file.write_text("\n\n\n".join([*result, *([imports] if imports else []), *values, *sources]) + "\n")
    return file
