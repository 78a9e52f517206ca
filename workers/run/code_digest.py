"""Digests of the source files that a reference names, and of the user's files that these import.

Nothing is imported or executed: a reference is located as `envs.references` would resolve it, and imports are read from
the syntax tree. Files are followed within the folder of the file, the working directory and the package of the
reference; Penstock's and other installed packages are not. What code reads at run time is not seen.
"""

import ast
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import entry_points
from pathlib import Path

_OWN_PACKAGES = frozenset({"stream", "envs", "workers"})
_OWN_ROOT = Path(__file__).parents[2]
_INSTALLED = ("site-packages", "dist-packages")
_MAX_FILES = 1000


@dataclass(frozen=True)
class _Start:
    """The file that a reference names."""

    file: Path
    module: str
    root: Path
    """Folder in which the module's first package is found."""
    only_package: str = ""
    """Imports are followed within this package alone; empty: anywhere below the roots."""


def code_digests(ref: str, entry_point_group: str) -> dict[str, str]:
    """Return a digest of each source file of a reference, by its path within its folder or package.

    Empty if the reference is the address of a server, or cannot be located; resolving it then raises an error.
    """
    start = _locate(ref, entry_point_group)
    if start is None:
        return {}
    if start.only_package in _OWN_PACKAGES:
        return {_label(start.file, [start.root]): _digest(start.file)}
    roots = [start.root, *([] if start.only_package else [Path.cwd()])]
    found: dict[Path, str] = {}
    queue = [(start.file, start.module)]
    while queue and len(found) < _MAX_FILES:
        file, module = queue.pop()
        if file in found:
            continue
        found[file] = _digest(file)
        for name in _imported_names(file, module):
            top = name.partition(".")[0]
            if top in _OWN_PACKAGES or (start.only_package and top != start.only_package):
                continue
            if (below := _find_below(name, roots)) is not None:
                queue.append((below, name))
    return {_label(file, roots): digest for file, digest in sorted(found.items())}


def _locate(ref: str, group: str) -> _Start | None:
    adapter, _, address = ref.partition(":")
    if adapter and "://" in address:
        return None
    place, colon, _ = ref.rpartition(":")
    if colon and place.endswith(".py"):
        path = Path(place).expanduser().resolve()
        return _Start(path, path.stem, path.parent) if path.is_file() else None
    if not colon:
        place = next((entry.module for entry in entry_points(group=group, name=ref)), "")
    return _locate_module(place) if place else None


def _locate_module(name: str) -> _Start | None:
    """Find a module's file without importing its packages."""
    path: list[str] | None = [*sys.path, str(Path.cwd())]
    parts = name.split(".")
    spec = None
    for depth in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:depth]), path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or [])
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return None
    file = Path(spec.origin).resolve()
    root = file.parents[len(parts) if spec.submodule_search_locations else len(parts) - 1]
    is_shared = any(part in _INSTALLED for part in root.parts) or (parts[0] in _OWN_PACKAGES and root == _OWN_ROOT)
    return _Start(file, name, root, parts[0] if is_shared else "")


def _imported_names(file: Path, module: str) -> Iterator[str]:
    """Yield the full names of modules that a file may import; names that are no modules are among them."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join(filter(None, [*above, node.module or ""]))
            names = [base, *(f"{base}.{alias.name}" if base else alias.name for alias in node.names)]
        else:
            continue
        for name in filter(None, names):
            parts = name.split(".")
            yield from (".".join(parts[: i + 1]) for i in range(len(parts)))


def _find_below(name: str, roots: list[Path]) -> Path | None:
    for root in roots:
        place = root.joinpath(*name.split("."))
        for file in (place.with_suffix(".py") if place.name else place, place / "__init__.py"):
            if file.is_file():
                return file.resolve()
    return None


def _label(file: Path, roots: list[Path]) -> str:
    return next((str(file.relative_to(root)) for root in roots if file.is_relative_to(root)), file.name)


def _digest(file: Path) -> str:
    return hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()
